"""The parts of the peer watch that need no other process: tree, statuses, lines, verdicts."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from odb.watch import rendezvous, tree, watcher
from odb.watch.activity import Activity
from odb.watch.edge import Edge
from odb.watch.roster import Roster, pack_late, unpack_late
from odb.watch.status import Doing, Late, Seen, Status, late_ranks, report, status_of, unpack
from odb.watch.verdict import LostRank, Overdue, Verdict, Verdicts
from odb.watch.watcher import Watch
from odb.watch.wire import LONGEST_LINE, Line, WireError
from spec.config import Budget, Config, Place
from spec.messages import End, Filter, Finished, PostCounts, Pull
from spec.rank import Phase, RankState, Setup, start
from spec.samples import Sample

# ---------------------------------------------------------------- the tree


@pytest.mark.parametrize("world_size", [1, 2, 3, 64, 65, 66, 1024, 5000])
@pytest.mark.parametrize("fan_out", [1, 2, 64])
def test_every_rank_but_the_root_has_one_parent_that_knows_it(
    world_size: int, fan_out: int
) -> None:
    found = [c for r in range(world_size) for c in tree.children(r, world_size, fan_out)]
    assert sorted(found) == list(range(1, world_size))
    for rank in range(min(world_size, 200)):
        below = tree.children(rank, world_size, fan_out)
        assert len(below) <= fan_out
        assert all(tree.parent(child, fan_out) == rank for child in below)


def test_the_root_is_two_steps_from_4161_ranks_at_most() -> None:
    assert tree.parent(0) is None
    assert tree.ancestors(64) == [0]
    assert tree.ancestors(4160) == [64, 0]
    assert len(tree.ancestors(4161)) == 3


# ---------------------------------------------------------------- statuses and their report


def status(doing: Doing, round_: int = 5, step: int = 41, have: int = 0, want: int = 0) -> Status:
    return Status(doing, 0, round_, step, have, want)


def test_a_command_says_what_a_rank_does() -> None:
    setup = Setup(Config(Budget(tokens=8), window=4, slow_start=4), 0, 2)
    state, (pull,) = start(setup, 3)
    assert pull == Pull(4)
    state = state._replace(window=(Sample(0, 1, 1),))
    assert status_of(Pull(3), state) == Status(Doing.PULLING, 3, 0, 0, have=1, want=4)
    assert status_of(Filter(Sample(0, 1, 1)), state) is None, "takes no time"
    ended = RankState(Phase.ENDED, Place(3, 2, 9))
    done = status_of(End(Finished()), ended)
    assert done is not None
    assert done.doing is Doing.BETWEEN


def test_late_ranks_are_those_that_have_not_entered_the_exchange_that_others_wait_in() -> None:
    seen = {
        0: Seen(status(Doing.REPORTING), since=40.0),
        1: Seen(status(Doing.REPORTING), since=50.0),
        2: Seen(status(Doing.PULLING, have=12, want=1024), since=39.0),
        3: Seen(status(Doing.MAKING, step=41), since=10.0, silent_since=41.0),
        4: Seen(status(Doing.HANDING_OVER, step=40), since=60.0),
        5: Seen(status(Doing.TOTALLING, round_=4), since=60.0),
    }
    late = late_ranks(seen, now=100.0)
    assert [entry.rank for entry in late] == [2, 3, 4, 5]
    assert report(late).split("; rank") == [
        "rank 2: filling its window in round 5 (12 of 1024 samples) for 61 s",
        " 3: has not answered for 59 s; last seen: making the batch of step 41",
        " 4: waiting for its trainer to take a step (the batch of step 40 is ready) for 40 s",
        " 5: waiting for the other ranks' counts in round 4 for 40 s",
    ]


@pytest.mark.parametrize("doing", [Doing.BETWEEN, Doing.CLOSED])
def test_a_rank_that_has_ended_its_epoch_is_late_for_the_next(doing: Doing) -> None:
    other = Seen(status(doing), 0.0)
    waiting = Seen(status(Doing.REPORTING, round_=0)._replace(run=1), 0.0)
    assert [entry.rank for entry in late_ranks({0: waiting, 1: other}, 9.0)] == [1]
    same = Seen(status(Doing.REPORTING), 0.0)
    assert late_ranks({0: same, 1: other}, 9.0) == (), "it has taken part in all of that run"


def test_runs_over_the_same_epoch_are_told_apart() -> None:
    """A loader that is always at epoch 0: its second run waits for who has ended only the first."""
    fast, slow = Activity(), Activity()
    state = RankState(Phase.REPORTING, Place(0, 0, 0))
    for activity in (fast, slow):
        for command in (Pull(4), PostCounts(()), End(Finished())):
            activity.begin(command, state)
    for command in (Pull(4), PostCounts(())):
        fast.begin(command, state)
    assert (fast.seen.status.run, slow.seen.status.run) == (2, 1)
    assert [entry.rank for entry in late_ranks({0: fast.seen, 1: slow.seen}, 1e9)] == [1]


def test_nobody_is_late_while_nobody_waits() -> None:
    pulling = Seen(status(Doing.PULLING), 0.0)
    assert late_ranks({0: pulling, 1: Seen(status(Doing.MAKING), 0.0, 0.0)}, 99.0) == ()


def test_nothing_is_said_of_ranks_behind_a_silent_one() -> None:
    waiting = Seen(status(Doing.REPORTING), 0.0)
    silent = Seen(status(Doing.REPORTING), 0.0, silent_since=1.0)
    below = Seen(status(Doing.PULLING), 0.0)
    assert tree.parent(70) == 1
    assert [e.rank for e in late_ranks({0: waiting, 1: silent, 70: below}, 9.0)] == [1]


def test_a_report_names_a_few_and_counts_the_rest() -> None:
    late = [Late(r, status(Doing.STARTING), 1.0, None) for r in range(20)]
    assert report(late).endswith("and 12 more ranks")
    assert "not known" in report([])


def test_statuses_cross_to_another_clock() -> None:
    seen = Seen(status(Doing.PULLING, have=3, want=8), since=10.0, silent_since=15.0)
    rank, other = unpack(seen.pack(7, now=20.0), now=1000.0)
    assert (rank, other) == (7, Seen(seen.status, 990.0, 995.0))
    late = (Late(7, seen.status, 10.0, 5.0), Late(8, seen.status, 10.0, None))
    assert unpack_late(pack_late(late), 123.0) == late
    with pytest.raises((ValueError, KeyError, TypeError)):
        unpack([1, "FLYING", 0, 0, 0, 0, 0, 0, 0, None], 0.0)
    with pytest.raises(ValueError, match="no status"):
        unpack([1, "MAKING", 0, 0, 0, 0, 0, None], 0.0)


def test_a_warning_comes_again_after_twice_as_long(caplog: pytest.LogCaptureFixture) -> None:
    roster = Roster(0, warn_after=10.0)
    own = Seen(status(Doing.REPORTING), since=100.0)
    with caplog.at_level(logging.WARNING, "odb"):
        for second in range(100, 200):
            roster.warn(own, float(second))
        assert len(caplog.records) == 4  # after 10, 20, 40 and 80 s
        roster.warn(own._replace(since=195.0), 204.0)
        assert len(caplog.records) == 4, "a new exchange starts anew"
        roster.warn(own._replace(since=195.0), 205.0)
        assert len(caplog.records) == 5
        for second in range(300):
            Roster(0, None).warn(own, 100.0 + second)
        assert len(caplog.records) == 5


def test_without_the_root_a_rank_says_what_it_knows_itself() -> None:
    near, far = socket.socketpair()
    edge = Edge(near, 0)
    roster = Roster(1, 1.0)
    roster.above = edge
    own = Seen(status(Doing.REPORTING), edge.heard)
    told = pack_late((Late(2, status(Doing.PULLING), 4.0, None),))
    said = {"seen": [Seen(status(Doing.MAKING), edge.heard).pack(0, edge.heard)], "late": told}
    roster.note(edge, said, edge.heard)
    roster.look(own, [], edge.heard + 1)
    assert [entry.rank for entry in roster.late] == [2], "what the root said"
    roster.look(own, [], edge.heard + 60)
    assert report(roster.late).startswith("rank 0: has not answered for 60 s; last seen: making")
    near.close()
    far.close()


# ---------------------------------------------------------------- lines and tokens


def lines() -> tuple[Line, socket.socket]:
    near, far = socket.socketpair()
    return Line(near), far


def test_messages_arrive_whole_whatever_the_pieces() -> None:
    line, far = lines()
    far.sendall(b'{"t":"a"}\n{"t":')
    assert line.receive() == ([{"t": "a"}], False)
    far.sendall(b'"b"}\n')
    far.close()
    assert line.receive() == ([{"t": "b"}], True)
    line.close()


@pytest.mark.parametrize(
    "text", [b"GET / HTTP/1.1\n", b"[1]\n", b'{"x":1}\n', b"\xff\n", b"[" * 50_000 + b"\n"]
)
def test_what_is_no_message_is_refused(text: bytes) -> None:
    line, far = lines()
    far.sendall(text)
    with pytest.raises(WireError):
        line.receive()
    line.close()
    far.close()


def test_a_line_without_end_is_refused() -> None:
    line, far = lines()
    sender = threading.Thread(target=_flood, args=(far, LONGEST_LINE + (1 << 17)))
    sender.start()
    with pytest.raises(WireError, match="too long"):
        _receive_for_ever(line)
    line.close()
    sender.join(10)
    far.close()


def _receive_for_ever(line: Line) -> None:
    while True:
        line.receive()


def _flood(sock: socket.socket, count: int) -> None:
    with contextlib.suppress(OSError):
        sock.sendall(b"x" * count)


def test_a_neighbour_that_does_not_read_costs_bounded_memory() -> None:
    line, far = lines()
    for _ in range(200):
        line.send({"t": "x" * 100_000})
    assert line.unsent < 5 << 20
    line.close()
    far.close()


def test_only_callers_with_the_token_are_let_in() -> None:
    place = rendezvous.Place(0, 2, token="secret")
    assert rendezvous.token_fits(place, "secret")
    assert not any(rendezvous.token_fits(place, wrong) for wrong in ("", None, 5, "sécret"))


def test_ranks_of_one_host_listen_on_the_loop_back_only() -> None:
    place = rendezvous.meet(0, 2, lambda value: [value, value])
    assert [listener.getsockname()[0] for listener in place.listeners] == ["127.0.0.1"]
    for listener in place.listeners:
        listener.close()
    assert rendezvous.meet(1, 2, lambda value: [value, value]).listeners == [], "no children"


def test_the_outer_address_is_found_by_the_way_to_the_master(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "no-such-host.invalid")
    assert rendezvous.own_addresses()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert len(set(rendezvous.own_addresses())) == len(rendezvous.own_addresses())


# ---------------------------------------------------------------- verdicts


def test_each_loss_is_told_once_and_the_first_verdict_holds() -> None:
    verdicts, told = Verdicts(), list[Verdict]()
    assert verdicts.add(LostRank(2, "gone"))
    verdicts.listen(told.append)
    verdicts.tell()
    assert told == [LostRank(2, "gone")], "also what was found before"
    assert not verdicts.add(LostRank(2, "again"))
    assert verdicts.add(LostRank(1, "gone"))
    assert told == [LostRank(2, "gone")], "not before the other ranks have heard of it"
    assert not verdicts.add(Overdue(()))
    verdicts.tell()
    assert told == [LostRank(2, "gone"), LostRank(1, "gone")]
    assert verdicts.first == verdicts.wait(0) == LostRank(2, "gone")
    assert Verdicts().wait(0.01) is None


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_a_listener_that_fails_is_logged(
    error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    def fail(verdict: Any) -> None:
        raise error("in the callback")

    verdicts = Verdicts()
    verdicts.listen(fail)
    assert verdicts.add(LostRank(2, "gone"))
    verdicts.tell()
    assert "in the callback" in caplog.text


# ---------------------------------------------------------------- the thread, with sockets


@contextmanager
def watching_root(world_size: int) -> Iterator[tuple[Watch, tuple[str, int], str]]:
    """The watch of rank 0, where it listens, and the token."""
    place = rendezvous.meet(0, world_size, lambda value: [value] * world_size)
    address, token = place.listeners[0].getsockname()[:2], place.token
    watch = Watch(place, Activity(), None)
    try:
        yield watch, address, token
    finally:
        watch.close()


class Neighbour:
    """A rank that is played by the test."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(5)
        self.socket = sock
        self.heard: list[str] = []
        self._file = sock.makefile("rb")

    def until(self, kind: str) -> dict[str, Any]:
        """The next message of a kind. Fails at the end of the connection."""
        for line in self._file:
            message: dict[str, Any] = json.loads(line)
            self.heard.append(message["t"])
            if message["t"] == kind:
                return message
        raise AssertionError(f"no {kind!r} but {self.heard}")

    def ended(self) -> bool:
        """Whether the connection ends without a message."""
        return self._file.read() == b""

    def close(self) -> None:
        self._file.close()
        self.socket.close()


def child(rank: int, address: tuple[str, int], token: str) -> Neighbour:
    sock = socket.create_connection(address)
    sock.sendall(json.dumps({"t": "hello", "rank": rank, "token": token}).encode() + b"\n")
    return Neighbour(sock)


def test_other_ranks_hear_of_a_loss_before_a_callback_that_blocks() -> None:
    with watching_root(3) as (watch, address, token):
        called, release = threading.Event(), threading.Event()

        def block(verdict: Verdict) -> None:
            called.set()
            release.wait(10)

        watch.verdicts.listen(block)
        children = [child(rank, address, token) for rank in (1, 2)]
        assert [c.until("welcome")["t"] for c in children] == ["welcome"] * 2
        children[1].close()
        assert called.wait(5)
        assert children[0].until("lost")["rank"] == 2
        release.set()
        children[0].close()


@pytest.mark.parametrize("said", [b"[" * 200_000 + b"\n", b"x" * 5000, b'{"t":"hello"}\n', b""])
def test_a_stranger_is_sent_away_and_the_watch_goes_on(
    said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watcher, "GREETING_S", 0.1)
    with watching_root(2) as (watch, address, token):
        stranger = Neighbour(socket.create_connection(address))
        with contextlib.suppress(OSError):
            stranger.socket.sendall(said)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.ended()
        stranger.close()
        real = child(1, address, token)
        real.until("welcome")
        real.close()
        assert watch.verdicts.wait(5) is not None


def test_strangers_are_limited_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher, "MOST_CALLERS", 2)
    with watching_root(2) as (_, address, token):
        strangers = [Neighbour(socket.create_connection(address)) for _ in range(3)]
        assert strangers[0].ended()
        child(1, address, token).until("welcome")
        assert all(stranger.ended() for stranger in strangers), "nobody else is expected"


def test_a_neighbour_that_talks_nonsense_is_told_goodbye() -> None:
    with watching_root(2) as (watch, address, token):
        real = child(1, address, token)
        real.until("welcome")
        real.socket.sendall(b'{"t":"lost","rank":[],"reason":0}\n')
        real.until("bye")
        assert watch.verdicts.first is None
        real.close()


def test_a_watch_that_fails_says_goodbye(monkeypatch: pytest.MonkeyPatch) -> None:
    connected = threading.Event()

    def fail(*_: Any) -> None:
        if connected.is_set():
            raise RuntimeError("a filter of the user's")

    monkeypatch.setattr(Roster, "warn", fail)
    monkeypatch.setattr(logging.getLogger("odb"), "handle", fail)
    with watching_root(2) as (_, address, token):
        real = child(1, address, token)
        real.until("welcome")
        connected.set()
        real.until("bye")
        real.close()


def test_a_child_that_calls_while_its_parent_closes_hears_goodbye() -> None:
    with watching_root(2) as (watch, address, token):
        closing = threading.Thread(target=watch.close)
        closing.start()
        time.sleep(0.2)
        late = child(1, address, token)
        late.until("welcome")
        late.until("bye")
        late.socket.sendall(b'{"t":"bye"}\n')
        closing.join(0.5)
        assert not closing.is_alive()
        late.close()


def test_a_parent_that_never_answers_is_warned_of_and_not_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    offer = rendezvous.Offer((listener.getsockname(),), "token")
    watch = Watch(rendezvous.Place(1, 2, offer=offer), Activity(), None)
    parent, _ = listener.accept()
    parent.close()
    assert watch.verdicts.wait(0.5) is None
    watch.close()
    listener.close()
    assert [record.message for record in caplog.records if "cannot reach" in record.message]
    assert len(caplog.records) == 1


class Exhausted(socket.socket):
    """A listener when the process has no more files."""

    calls = 0

    def accept(self) -> Any:
        self.calls += 1
        raise OSError(errno.EMFILE, "too many open files")


def test_a_listener_without_files_rests_until_the_next_beat() -> None:
    listener = Exhausted()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    place = rendezvous.Place(0, 2, listeners=[listener], waiting={1})
    watch = Watch(place, Activity(), None)
    caller = socket.create_connection(listener.getsockname())
    time.sleep(1.5)
    assert 1 <= listener.calls <= 3
    watch.close()
    caller.close()


def test_a_watch_without_sockets_warns_and_does_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> Any:
        raise OSError(errno.EMFILE, "too many open files")

    place = rendezvous.meet(0, 2, lambda value: [value] * 2)
    monkeypatch.setattr(socket, "socketpair", fail)
    watch = Watch(place, Activity(), None)
    assert "too many open files" in caplog.text
    assert (watch.overdue(), watch.late(), watch.verdicts.first) == ((), (), None)
    watch.close()
    assert [sock.fileno() for sock in watch.sockets()] == [-1]
    monkeypatch.setattr(socket, "socket", fail)
    assert rendezvous.meet(0, 2, lambda value: [value] * 2).listeners == []
