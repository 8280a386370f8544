"use strict";
(function () {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const lastStep = data.steps.length;
  let current = 0;

  // Text always goes in as text, never as markup.
  function el(tag, name, ...children) {
    const node = document.createElement(tag);
    if (name) node.className = name;
    for (const child of children) {
      if (child !== null) node.append(child);
    }
    return node;
  }

  const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);
  const none = (word) => el("span", "none", word);

  // The action that raised led to no state: the ranks stand as before it.
  const momentOf = (step) => data.moments[Math.min(step, data.moments.length - 1)];

  function chip(sample, before) {
    const isNew = before !== null && !before.some((other) => other.seq === sample.seq);
    const name = "chip" + (sample.over ? " over" : "") + (isNew ? " new" : "");
    const node = el("span", name, el("b", "", String(sample.seq)), el("small", "", "cost " + sample.cost));
    if (sample.over) node.title = "above the budget by itself";
    return node;
  }

  const chips = (list, before) => list.map((sample) => chip(sample, before));
  const samplesIn = (slots) => slots.flatMap((slot) => slot.chips);

  function slot(label, samples, before) {
    const content = samples.length ? chips(samples, before) : [none("idle")];
    return el("span", "slot", label ? el("span", "", label) : null, ...content);
  }

  function windowOf(card, before) {
    const found = chips(card.window, before && before.window);
    for (let i = card.window.length; i < data.window; i++) found.push(el("span", "place", "\u00a0"));
    return found;
  }

  function queueOf(card, before) {
    const old = before && samplesIn(before.queue);
    const found = card.queue.map((step) => slot("step " + step.step, step.chips, old));
    for (let i = card.queue.length; i < data.queue; i++) {
      found.push(el("span", "slot empty", none("empty slot")));
    }
    if (card.outbox) found.push(el("span", "none", card.outbox));
    return found;
  }

  function list(lines, empty) {
    if (!lines.length) return [none(empty)];
    return [el("div", "lines", ...lines.map((line) => el("div", "", line)))];
  }

  function row(label, content, changed, bad) {
    const term = el("dt", "", label);
    if (changed) term.append(el("span", "hidden", " (changed)"));
    return el("div", "row" + (changed ? " changed" : "") + (bad ? " bad" : ""), term, el("dd", "", ...content));
  }

  function cardOf(rank, card, before) {
    const changed = (...keys) => before !== null && keys.some((key) => !same(card[key], before[key]));
    const old = (key) => before && before[key];
    const or = (found, word) => (found.length ? found : [none(word)]);
    const oldGroups = before && before.groups.flat();
    const oldPending = before && samplesIn(before.pending);
    const oldWaiting = before && samplesIn(before.waiting);
    const rows = [
      row("Batcher", [card.doing], changed("doing")),
      row("Input", [card.input], changed("input")),
      row("Window", windowOf(card, before), changed("window")),
      row("Groups", or(card.groups.map((g) => slot("", g, oldGroups)), "none"), changed("groups")),
      row("To hand over", or(card.pending.map((s) => slot("step " + s.step, s.chips, oldPending)), "no step"), changed("pending")),
      row("Queue", queueOf(card, before), changed("queue", "outbox")),
      row("Trainer", [card.trainer], changed("trainer")),
      row("Delivered", or(chips(card.delivered, old("delivered")), "nothing yet"), changed("delivered")),
    ];
    if (card.waiting.length || changed("waiting")) {
      rows.splice(4, 0, row("Wait for their block", or(card.waiting.map((s) => slot("step " + s.step, s.chips, oldWaiting)), "no step"), changed("waiting")));
    }
    for (const [key, label] of [["filtered", "Filtered"], ["dropped", "Dropped"], ["lost", "Lost"]]) {
      if (card[key].length) rows.push(row(label, chips(card[key], old(key)), changed(key), key === "lost"));
    }
    const stuck = current === lastStep && data.promise === "deadlock-freedom" && card.waits.length > 0;
    rows.push(row("Waits", list(card.waits, "for nobody"), changed("waits"), stuck));
    const head = el("h3", "", "Rank " + rank, el("small", "", card.place));
    return el("article", "card" + (card.alive ? "" : " dead"), head, el("dl", "", ...rows));
  }

  function showNow(step) {
    const now = $("now");
    now.replaceChildren();
    now.className = step && data.steps[step - 1].last ? "failing" : "";
    if (!step) {
      now.append(el("p", "what", "The start"), el("p", "none", "Nothing has happened yet. Press Next, or the right arrow key."));
      return;
    }
    const told = data.steps[step - 1];
    now.append(el("p", "what", step + ". " + told.text));
    const effects = told.effects.map((effect) => el("li", effect.loss ? "loss" : "", effect.text));
    if (told.error) effects.push(el("li", "loss", "this raises " + told.error));
    if (effects.length) now.append(el("ul", "", ...effects));
    if (told.last) now.append(el("p", "breaks", "Here the promise " + data.promise + " breaks."));
  }

  function show(step) {
    current = Math.max(0, Math.min(lastStep, step));
    const moment = momentOf(current);
    const before = current ? momentOf(current - 1) : null;
    showNow(current);
    const raised = current >= data.moments.length;
    $("moment").textContent = !current ? "The ranks at the start" : raised ? "The ranks before action " + current + ", which raised" : "The ranks after action " + current;
    const meetings = [["In an exchange:", "exchange"], ["In the gradient:", "gradient"]].filter(([, key]) => data.coupled || key === "exchange");
    $("meetings").replaceChildren(...meetings.map(([label, key]) =>
      el("div", before && before[key] !== moment[key] ? "changed" : "", el("dt", "", label), el("dd", "", moment[key]))));
    $("ranks").replaceChildren(...moment.cards.map((card, rank) => cardOf(rank, card, before && before.cards[rank])));
    $("slider").value = current;
    $("slider").setAttribute("aria-valuetext", "action " + current + " of " + lastStep);
    $("count").textContent = "action " + current + " of " + lastStep;
    $("first").disabled = $("previous").disabled = current === 0;
    $("next").disabled = $("last").disabled = current === lastStep;
    [...$("steps").children].forEach((item, number) => {
      const button = item.firstChild;
      if (number === current) button.setAttribute("aria-current", "step");
      else button.removeAttribute("aria-current");
      // Scroll the list alone, never the page.
      const box = $("steps");
      if (number === current && box.scrollHeight > box.clientHeight) {
        box.scrollTop = item.offsetTop - box.clientHeight / 2;
      }
    });
  }

  function go(step) {
    show(step);
    history.replaceState(null, "", "#step=" + current);
  }

  function fromAddress() {
    const match = /^#step=(\d+)$/.exec(location.hash);
    show(match ? Number(match[1]) : 0);
  }

  function item(number, text, last) {
    const button = el("button", last ? "failing" : "", el("span", "", String(number)), el("span", "", text, last ? el("small", "", " ✗ breaks") : null));
    button.type = "button";
    button.addEventListener("click", () => go(number));
    return el("li", "", button);
  }

  $("steps").append(item(0, "The start", false), ...data.steps.map((step, i) => item(i + 1, step.text, step.last)));
  $("slider").max = lastStep;
  $("slider").addEventListener("input", (event) => go(Number(event.target.value)));
  $("first").addEventListener("click", () => go(0));
  $("previous").addEventListener("click", () => go(current - 1));
  $("next").addEventListener("click", () => go(current + 1));
  $("last").addEventListener("click", () => go(lastStep));
  document.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
    if (event.target === $("slider")) return; // it moves by itself
    const to = { ArrowLeft: current - 1, ArrowRight: current + 1, Home: 0, End: lastStep }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    go(to);
  });
  window.addEventListener("hashchange", fromAddress);
  $("text").open = false;
  $("app").hidden = false;
  fromAddress();
})();
