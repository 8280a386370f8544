"""Ranks on a network of their own, whose cable is pulled: real interfaces, one namespace a rank."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

LIMIT_S = 60.0
"""After which a rank hangs."""


def ip(*args: str, check: bool = True) -> None:
    subprocess.run(["ip", *args], check=check, capture_output=True, text=True, timeout=20)


def why_not() -> str | None:
    """Why namespaces cannot be made here, if they cannot."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "needs `ip` (Debian: apt-get install iproute2) and `unshare`"
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    try:
        with Network(1).open():
            return None
    except (subprocess.SubprocessError, OSError) as error:
        return f"namespaces cannot be made: {getattr(error, 'stderr', None) or error}"


@dataclass
class Network:
    """A bridge in a namespace, and for each rank a namespace with an address on it."""

    size: int
    name: str = field(default_factory=lambda: f"odb{secrets.token_hex(3)}")

    def host(self, rank: int) -> str:
        return f"{self.name}-{rank}"

    @property
    def hub(self) -> str:
        return f"{self.name}-hub"

    @contextmanager
    def open(self) -> Iterator[Network]:
        try:
            ip("netns", "add", self.hub)
            ip("-n", self.hub, "link", "add", "br0", "type", "bridge")
            ip("-n", self.hub, "link", "set", "br0", "up")
            for rank in range(self.size):
                host, cable = self.host(rank), f"cable{rank}"
                ip("netns", "add", host)
                ip("-n", host, "link", "set", "lo", "up")
                ip(
                    "-n",
                    self.hub,
                    "link",
                    "add",
                    cable,
                    "type",
                    "veth",
                    "peer",
                    "eth0",
                    "netns",
                    host,
                )
                ip("-n", self.hub, "link", "set", cable, "master", "br0", "up")
                ip("-n", host, "address", "add", f"10.77.0.{rank + 1}/24", "dev", "eth0")
                ip("-n", host, "link", "set", "eth0", "up")
            yield self
        finally:  # interfaces go with their namespaces
            for rank in range(self.size):
                ip("netns", "delete", self.host(rank), check=False)
            ip("netns", "delete", self.hub, check=False)

    def pull(self, rank: int) -> None:
        """Pull a rank's cable: what it sends is lost, and nobody is told."""
        ip("-n", self.hub, "link", "set", f"cable{rank}", "down")

    def plug(self, rank: int) -> None:
        """Plug it in again."""
        ip("-n", self.hub, "link", "set", f"cable{rank}", "up")


REASON = why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


SCRIPT = """
import json, logging, socket, sys, time
from datetime import timedelta
rank, world_size, timeout = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
socket.sethostname(f"host-{rank}")
import torch.distributed as dist
import odb
logs = []
handler = logging.Handler()
handler.emit = lambda record: logs.append(record.getMessage())
logging.getLogger("odb").addHandler(handler)
dist.init_process_group(
    "gloo", init_method="env://", rank=rank, world_size=world_size,
    timeout=timedelta(seconds=30),
)
samples = [{"input_ids": [1] * (5 + i % 7)} for i in range(600)]
loader = odb.ODBDataLoader(samples, token_budget=32, window=8, timeout=timeout, warn_after=2.0)
seen = {"ids": [], "steps": 0, "error": None}
try:
    for _, info in loader.steps():
        seen["ids"].extend(info.sample_ids)
        seen["steps"] += 1
        print(json.dumps({"step": info.step}), flush=True)
        time.sleep(0.03)
except odb.ODBError as error:
    seen["error"] = type(error).__name__
    seen["missing"] = getattr(error, "missing", None)
    seen["text"] = str(error)
loader.close()
seen["logs"] = logs
print(json.dumps(seen), flush=True)
"""


ENVIRONMENT = {
    "MASTER_ADDR": "10.77.0.1",
    "MASTER_PORT": "29500",
    "GLOO_SOCKET_IFNAME": "eth0",
    "OMP_NUM_THREADS": "1",
}


def start(network: Network, rank: int, timeout: float) -> subprocess.Popen[str]:
    script = [sys.executable, "-c", SCRIPT, str(rank), str(network.size), str(timeout)]
    return subprocess.Popen(
        ["ip", "netns", "exec", network.host(rank), "unshare", "--uts", *script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **ENVIRONMENT},
    )


def run(size: int, victim: int, timeout: float, down_s: float | None) -> list[dict[str, Any]]:
    """Train; pull the victim's cable at step 5, and plug it in after some seconds, or never."""
    with Network(size).open() as network:
        ranks = [start(network, rank, timeout) for rank in range(size)]
        try:
            assert ranks[0].stdout is not None
            for line in ranks[0].stdout:
                if json.loads(line)["step"] == 5:
                    break
            network.pull(victim)
            if down_s is not None:
                time.sleep(down_s)
                network.plug(victim)
            results = []
            for process in ranks:
                out, errors = process.communicate(timeout=LIMIT_S)
                assert process.returncode == 0, errors[-2000:]
                results.append(json.loads(out.splitlines()[-1]))
            return results
        finally:
            for process in ranks:
                process.kill()
                process.wait()


@pytest.mark.parametrize("victim", [0, 2])
def test_a_dead_link_ends_in_a_timeout_that_names_who_is_missing(victim: int) -> None:
    """Promise: nobody hangs. No side is told that the link is dead: there is no reset."""
    results = run(3, victim, timeout=8.0, down_s=None)
    for rank, seen in enumerate(results):
        assert seen["error"] == "ExchangeTimeoutError", seen
        if rank == victim:
            assert seen["missing"], "it names others"
            assert victim not in seen["missing"]
        else:
            assert victim in seen["missing"], seen
            assert "has not answered" in seen["text"]
            assert any(
                "has waited" in line and f"rank {victim}:" in line for line in seen["logs"]
            ), seen["logs"]
    assert not set(results[0]["ids"]) & set(results[1]["ids"]) & set(results[2]["ids"])


def test_a_link_that_comes_back_loses_nothing() -> None:
    results = run(3, 1, timeout=60.0, down_s=4.0)
    assert [seen["error"] for seen in results] == [None] * 3, results
    assert sorted(i for seen in results for i in seen["ids"]) == list(range(600))
    assert len({seen["steps"] for seen in results}) == 1


def test_no_namespace_is_left_behind() -> None:
    network = Network(2)
    with pytest.raises(ZeroDivisionError), network.open():
        _ = 1 / 0
    listed = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    assert network.name not in listed
