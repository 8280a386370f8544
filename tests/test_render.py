"""Counterexamples for people: what they say is what happened, in words, diagram and page."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from typing import get_args

import pytest

from model_check.closed import ClosedSystem, Reduction
from model_check.explorer import explore
from model_check.mutants import Fall, judge
from model_check.profiles import JOIN_PAD, JOIN_STOP, LONG, SHORT, Case, for_mutants
from model_check.render import words
from model_check.render.cards import moments
from model_check.render.effects import Kind, effects
from model_check.render.html import as_html
from model_check.render.mermaid import as_mermaid
from model_check.render.sentences import Change, sentence
from model_check.render.story import told, what_is_wrong
from model_check.render.text import as_text
from model_check.render.trace import Trace, trace_of
from spec.enabled import actions
from spec.messages import Finished
from spec.system import FAULTS, act, initial_states
from spec.variants import VARIANTS
from spec.world import Action, Faults, Stop, World

HINTS = {
    "carry-keeps-largest": "3 samples",
    "carry-keeps-youngest": "3 samples",
    "longer-window": "3 samples",
    "close-ignored": "stops",
    "slot-not-released": "stops",
    "epochs-overlap": "stops",
    "epochs-overlap-unnoticed": "stops",
    "failure-ignored": "1 fault",
    "failed-ranks-leave": "1 fault",
    "failed-batch-leaves-gap": "1 fault",
    "failed-batch-forgotten": "1 fault",
    "abort-overtakes-steps": "1 fault",
}
"""Where some variants fall at once: to save time, such worlds come first."""


@cache
def trace(name: str) -> Trace:
    """The shortest run by which a variant falls."""
    hint = HINTS.get(name, "")
    cases = sorted(for_mutants(), key=lambda case: hint not in case.name)
    fall = judge(name, VARIANTS[name], cases).fall
    assert fall is not None
    return trace_of(fall, f"{name}: {VARIANTS[name].description}")


# ---------------------------------------------------------------- every variant

HEAD = re.compile(r"sequenceDiagram|    title [^;#<>]+|    participant [BTXG]\d* as [a-z0-9 ]+")
TEXT = r"[^;#<>]+(<br/>[^;#<>]+)*"
LINE = re.compile(
    rf"    ([BTXG]\d*(->>|-->>|-x|--x)[BTXG]\d*: {TEXT}|Note over [BTXG]\d*(,[BTXG]\d*)?: {TEXT})"
)
"""All that our diagrams consist of (`mermaid.parse` takes it): no `;` or `#`, which would end a
statement or begin an entity, and no tag but a line break."""


@pytest.mark.parametrize("name", VARIANTS)
def test_every_fall_can_be_shown(name: str) -> None:
    found = trace(name)
    check_faithful(found)
    check_text(found)
    check_mermaid(found)
    check_page(found)


def check_faithful(found: Trace) -> None:
    """The trace is a run of the closed system, and its last action raises where it says so."""
    for before, action, after in zip(found.states, found.actions, found.states[1:], strict=False):
        assert action in list(actions(found.world, before))
        assert act(found.world, before, action) == after
    if found.raised:
        error = found.text.partition(":")[0]
        with pytest.raises(Exception, match=r".") as raised:
            act(found.world, found.states[-1], found.actions[-1])
        assert type(raised.value).__name__ == error


def check_text(found: Trace) -> None:
    text = as_text(found)
    assert found.title in flat(text)
    assert f"broken promise  {found.promise}" in text
    assert found.promise in words.PROMISES
    assert found.promise in words.CONSEQUENCES
    assert text.count("^ here the promise breaks") == 1
    assert "What is wrong" in text
    assert not re.search(r"Sample\(|frozenset|Enum|None\b|<[A-Z]", text), "Python shows through"
    assert max(map(len, text.splitlines())) <= 90
    numbers = [int(n) for n in re.findall(r"^ {0,3}(\d+)\. [A-Z]", text, re.MULTILINE)]
    assert numbers == list(range(1, len(found.actions) + 1))


def check_syntax(found: Trace) -> tuple[list[str], list[str]]:
    lines = as_mermaid(found).splitlines()
    participants = 2 * found.world.world_size + 2
    head, body = lines[: 2 + participants], lines[2 + participants :]
    assert [line for line in head if not HEAD.fullmatch(line)] == []
    assert [line for line in body if not LINE.fullmatch(line)] == []
    return head, body


def check_mermaid(found: Trace) -> None:
    head, body = check_syntax(found)
    declared = {line.split()[1] for line in head[2:]}
    used = set(re.findall(r"(?:^    |>>|-x|over |,)([BTXG]\d*)(?=[-:,])", "\n".join(body), re.M))
    assert used <= declared
    for number in range(1, len(found.actions) + 1):
        assert any(f": {number}. " in line for line in body)
    assert f"BROKEN: {found.promise}" in body[-1].replace("<br/>", " ")


def check_page(found: Trace) -> None:
    page = Page(as_html(found))
    data = json.loads(page.script("data"))
    assert [step["text"] for step in data["steps"]] == [str(t.sentence) for t in told(found)]
    assert [step["last"] for step in data["steps"]] == [
        i + 1 == len(found.actions) for i in range(len(found.actions))
    ]
    assert len(data["moments"]) == len(found.states)
    assert all(len(m["cards"]) == found.world.world_size for m in data["moments"])
    assert page.texts["pre"] == as_text(found)
    assert page.loads == []


# ---------------------------------------------------------------- every action


def walk(world: World, seed: int) -> Trace:
    """A random run with a fault now and then, told as if it ended badly."""
    choice = random.Random(seed)
    state = choice.choice(list(initial_states(world)))
    states, done = [state], []
    while possible := list(actions(world, state)):
        calm = [action for action in possible if not isinstance(action, FAULTS)]
        action = choice.choice(calm if calm and choice.random() < 0.9 else possible)
        state = act(world, state, action)
        states.append(state)
        done.append(action)
    return Trace(f"walk {seed}", "deadlock-freedom", "", world, tuple(states), tuple(done))


WALKS = (
    World(JOIN_PAD, 2, (SHORT, LONG), 2, faults=Faults(2)),
    World(JOIN_STOP, 3, (SHORT, LONG), 2, queue=2),
    World(JOIN_PAD, 2, (SHORT,), 2, epochs=2, stop=Stop.TOGETHER),
    World(JOIN_PAD, 2, (SHORT, LONG), 2, coupled=False, stop=Stop.ALONE),
    World(JOIN_STOP, 2, (LONG,), 2, epochs=2, faults=Faults(1, crash=False)),
)


def test_every_kind_of_action_has_a_sentence() -> None:
    """A new action without a sentence fails here, or is never seen."""
    unseen = set(get_args(Action))
    said: dict[type, str] = {}
    for seed in range(40):
        for world in WALKS:
            found = walk(world, seed)
            for told_ in told(found):
                said[type(told_.action)] = str(told_.sentence)
                unseen.discard(type(told_.action))
                assert not any(effect.kind is Kind.LOSS for effect in told_.effects), found
    assert unseen == set(), "worlds in WALKS should reach it"
    assert len(set(said.values())) == len(said)


@pytest.mark.parametrize("world", WALKS)
def test_random_runs_can_be_shown(world: World) -> None:
    for seed in range(6):
        found = walk(world, seed)
        check_faithful(found)
        check_mermaid(found)
        check_page(found)


def test_an_unknown_action_is_refused() -> None:
    class Sneeze:
        rank = 0

    state = next(initial_states(WALKS[0]))
    with pytest.raises(AssertionError, match="no sentence"):
        sentence(WALKS[0], Change(state, Sneeze(), state))  # type: ignore[arg-type]


def test_what_is_shown_of_a_rank_is_its_state() -> None:
    found = walk(WALKS[1], seed=3)
    for moment, state in zip(moments(found), found.states, strict=True):
        for card, node in zip(moment.cards, state.nodes, strict=True):
            assert [chip.seq for chip in card.window] == [s.seq for s in node.machine.window]
            assert [slot.step for slot in card.queue] == [step.number for step in node.queue]
            assert sum(1 << chip.seq for chip in card.delivered) == node.taken
            costs = {s.seq: s.cost for step in node.queue for s in step.group}
            assert {c.seq: c.cost for slot in card.queue for c in slot.chips} == costs
            assert card.lost == ()


# ---------------------------------------------------------------- what they say


def flat(text: str) -> str:
    return " ".join(text.split())


def saying(name: str) -> str:
    """The text of a variant's fall, without line breaks."""
    return flat(as_text(trace(name)))


def test_a_lost_sample_is_followed_to_where_it_was_last_seen() -> None:
    text = saying("carry-dropped")
    assert "1. Rank 0 reads sample 0 (cost 1)." in text
    assert "rank 0 has a full window, forms 2 groups {1} {0} and posts its report" in text
    assert "The exchange of reports completes: most groups wanted 2, fewest samples held 1" in text
    assert "rank 0 LOSES sample 1" in text
    assert "Sample 1 of rank 0 was last seen in the groups of the round" in text
    assert [chip.seq for chip in moments(trace("carry-dropped"))[-1].cards[0].lost] == [1]


def test_a_deadlock_says_who_waits_for_whom() -> None:
    text = saying("slot-not-released")
    assert "trainer stops early" in text
    assert "leaves its queue as it is, and does not tell its batcher" in text
    assert "- rank 0 batcher waits for rank 0 trainer to make room in the queue" in text
    assert "a circle: rank 0 trainer -> rank 0 batcher -> rank 0 trainer" in text
    waits = moments(trace("slot-not-released"))[-1].cards[0].waits
    assert "batcher waits for its trainer to make room in the queue" in waits


def test_an_overtaken_step_is_dropped_before_the_error() -> None:
    text = saying("abort-overtakes-steps")
    assert "drops sample 0, which its queue still held" in text
    assert "ends the epoch: aborted, as rank" in text
    assert "1 step was decided on, 0 handed over" in text


def test_epochs_that_overlap_name_both_numbers() -> None:
    text = saying("epochs-overlap")
    assert "ranks differ in their epoch: 0 and 1" in text
    assert "had not ended epoch 0" in text


def test_without_an_exchange_nobody_is_asked() -> None:
    text = saying("published-no-exchange")
    assert "decides by itself: it asks no other rank" in text
    assert "trainer waits for rank 1 trainer in gradient step 0" in text
    assert "The exchange of" not in text


def test_an_action_that_raises_says_what_and_why() -> None:
    text = saying("target-ignores-smallest")
    assert "this raises EnvelopeError: cannot align 1 sample to 2 steps" in text
    assert "the round is to have 2 steps; rank 1 holds 1 sample in 1 group" in text
    assert told(trace("target-ignores-smallest"))[-1].error is not None


def test_an_idle_step_and_a_lent_sample_are_named() -> None:
    text = saying("failed-batch-leaves-gap") + saying("abort-overtakes-steps")
    assert "has no sample to put in: it will idle" in text
    assert "will idle with a sample that rank 0 lends it" in text


def test_what_the_checker_says_is_put_into_words() -> None:
    assert words.plain("samples [0, 2] are lost") == "samples 0 and 2 are lost"
    assert words.plain("samples [1] are lost") == "sample 1 is lost"
    held = "and (Sample(seq=0, cost=1, weight=1, extras=()),) are still held"
    assert words.plain(held) == "and sample 0 is still held"
    steps = words.plain("the queue holds steps [1] where [0] come next")
    assert steps == "the queue holds step 1 where step 0 comes next"


def test_a_batch_above_the_budget_and_a_late_sample_are_measured() -> None:
    text = saying("oversize-in-company")
    assert "step 0 holds samples of cost 5 and 1" in text
    assert "batch of step 0, padded, comes to 10 tokens; the budget is 3" in text
    text = saying("carry-keeps-largest")
    assert "Sample 1 of rank 0 arrived in round 0 and leaves in round 2 only" in text


def test_totals_that_are_untrue_show_against_the_exchange() -> None:
    text = saying("quota-by-own-count")
    assert "The exchange of counts completes: step 1 of the round: 2 samples." in text
    assert "has now to hand over step 0 (sample 0; 1 on all ranks)" in text


def test_a_rank_that_changes_nothing_has_no_effects() -> None:
    node = next(initial_states(WALKS[0])).nodes[0]
    assert effects(WALKS[0], 0, node, node) == ()
    ended = effects(WALKS[0], 0, node, node._replace(outcome=Finished()))
    assert any("ends the epoch: finished" in effect.text for effect in ended)


# ---------------------------------------------------------------- ranks keep their names


@pytest.mark.parametrize("name", ["carry-dropped", "target-ignores-smallest", "steps-reversed"])
def test_a_run_found_under_symmetry_is_told_with_the_names_of_ranks(name: str) -> None:
    world = VARIANTS[name].within(World(JOIN_PAD, 3, (SHORT, LONG), 2))
    system = ClosedSystem(world, Reduction(symmetry=True, ample=True))
    violation = explore(system, system.question()).violation
    assert violation is not None
    found = trace_of(Fall(Case(name, world), system, violation), name)
    assert found.promise == violation.promise
    check_faithful(found)
    check_text(found)
    if found.promise == "identity-coverage":
        rank = int(re.findall(r"^rank (\d)", found.text)[0])
        assert moments(found)[-1].cards[rank].lost


def test_a_run_that_goes_round_says_which_actions_repeat() -> None:
    found = trace("carry-dropped")
    round_ = replace(found, promise="bounded-termination", repeats=3)
    text = flat(as_text(round_))
    assert "After action 6 everything, but for the names of ranks, is as it was after" in text
    assert "actions 4 to 6 can be repeated for ever" in text
    assert "never ends" in flat(as_html(round_))
    found_again = replace(round_, states=(*found.states[:-1], found.states[3]))
    assert "everything is as it was after action 3" in flat(as_text(found_again))


def test_a_trace_that_does_not_fit_together_is_refused() -> None:
    found = trace("carry-dropped")
    with pytest.raises(ValueError, match="do not fit"):
        replace(found, actions=found.actions[:-2])


# ---------------------------------------------------------------- the page


class Page(HTMLParser):
    """Reads a page as a browser would: its scripts, its text, and what it would load."""

    LOADING = frozenset({"src", "href", "srcset", "action", "data", "poster", "background"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.scripts: list[tuple[str | None, str]] = []
        self.texts: dict[str, str] = {}
        self.loads: list[str] = []
        self.tags: list[str] = []
        self.open: list[str] = []
        self.feed(page)
        self.close()
        self.loads += re.findall(r"@import|url\(|https?:|//\w+\.\w+", page)
        assert self.open == [], "every element is closed"

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [f"{tag} {key}={value}" for key, value in attrs if key in self.LOADING]
        assert not any(key.startswith("on") for key, _ in attrs)
        if tag not in ("meta", "input"):
            self.open.append(tag)
        if tag == "script":
            self.scripts.append((dict(attrs).get("id"), ""))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        within = self.open[-1] if self.open else ""
        self.texts[within] = self.texts.get(within, "") + data
        if within == "script":
            name, text = self.scripts[-1]
            self.scripts[-1] = (name, text + data)

    def script(self, name: str) -> str:
        return dict(self.scripts)[name]


def test_the_page_escapes_what_it_is_given() -> None:
    nasty = '</script><img src=x onerror=alert(1)> & "quotes" {{DATA}} ; # \''
    found = replace(trace("carry-dropped"), title=nasty, text=nasty, promise=f"no-{nasty}")
    page = Page(as_html(found))
    assert "img" not in page.tags
    assert page.tags.count("script") == 2
    assert page.loads == []
    assert nasty in page.texts["h1"]
    assert json.loads(page.script("data"))["promise"] == f"no-{nasty}"
    check_syntax(found)


def test_the_page_explains_itself_without_a_script() -> None:
    html = as_html(trace("carry-dropped"))
    for line in what_is_wrong(trace("carry-dropped"))[1:]:
        assert flat(line) in flat(Page(html).texts["p"])
    assert '<main id="app" hidden>' in html
    assert '<details class="text" id="text" open>' in html


def test_the_page_works_without_a_mouse_and_in_the_dark() -> None:
    html = as_html(trace("carry-dropped"))
    for part in ("ArrowLeft", "ArrowRight", "Home", "End", "#step=", "prefers-color-scheme: dark"):
        assert part in html
    for control in ("first", "previous", "next", "last", "slider"):
        assert f'id="{control}"' in html
    assert "innerHTML" not in html
