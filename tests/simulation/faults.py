"""What goes wrong in a run, and for how long. Each fault begins at once and ends by itself; the end
of the faults' time ends them all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from simulation.store import STORE

if TYPE_CHECKING:
    from simulation.whole import WholeWorld
    from simulation.world import Node, Run, World

JUMP_MS = 3_000
LOST_MAX = 3


def _node(world: World) -> Node:
    """One of the daemons; the one that leads more often than another."""
    leading = [node for node in world.nodes if node.daemon and node.daemon.roles.shard]
    return world.rnd.choice(leading if leading and world.rnd.random() < 0.6 else world.nodes)


def for_s(world: Run, low_s: float, high_s: float, end: Callable[[], object]) -> None:
    """End it after some time."""
    world.loop.call_later(world.rnd.uniform(low_s, high_s), end)


def kill(world: World) -> None:
    """A daemon's process is killed."""
    _node(world).kill(silently=False)


def power_cut(world: World) -> None:
    """A daemon's machine is gone, without a word to anybody."""
    _node(world).kill(silently=True)


def freeze(world: World) -> None:
    """A daemon's process stands still, perhaps for longer than its lease."""
    node = _node(world)
    host = node.host
    host.freeze()
    for_s(world, *_spell_s(world), host.thaw)


def drain(world: World) -> None:
    """A daemon is asked to stop."""
    _node(world).drain()


def hand_over(world: World) -> None:
    """The daemon that leads is asked to stop, while another one stands by."""
    leading = [node for node in world.nodes if node.daemon and node.daemon.roles.shard]
    others = [
        node
        for node in world.nodes
        if node not in leading and node.host.is_alive and node.daemon
        and not node.daemon.draining and node.daemon.roles.role == "standby"
    ]  # fmt: skip
    if others:
        for node in leading:
            node.drain()


def cut(world: World) -> None:
    """All connections of a daemon break."""
    world.net.cut(_node(world).name)


def cut_off_from_store(world: World) -> None:
    """A daemon does not reach the store, or does not hear its answers. Its clients reach it."""
    name = _node(world).name
    ways = world.rnd.choice(("both", "to", "from"))
    if ways == "both":
        world.net.block(name, STORE)
    else:
        here, there = (name, STORE) if ways == "to" else (STORE, name)
        world.net.block(here, there, one_way=True)

    def end() -> None:
        world.net.unblock(name, STORE)
        world.server.arrive_late()

    for_s(world, *_spell_s(world), end)


def cut_off_from_client(world: World) -> None:
    """A client and a daemon do not reach each other, or only one the other."""
    here, there = _node(world).name, world.rnd.choice(world.programs).name
    world.net.block(here, there, one_way=world.rnd.random() < 0.3)
    for_s(world, 0.1, 3.0, lambda: world.net.unblock(here, there))


def slow_network(world: World | WholeWorld) -> None:
    """Everything takes long on its way, and connections overtake each other."""
    world.net.is_slow = True

    def end() -> None:
        world.net.is_slow = False

    for_s(world, 0.1, 1.5, end)


def slow_store(world: World) -> None:
    """Each batch takes long."""
    world.server.is_slow = True

    def end() -> None:
        world.server.is_slow = False

    for_s(world, 0.1, 1.5, end)


def standing_store(world: World) -> None:
    """The store stands still: it does later what it was asked meanwhile."""
    host = world.server.host
    host.freeze()
    for_s(world, 0.1, 2.0, host.thaw)


def refusing_store(world: World) -> None:
    """The store takes no batch."""
    world.server.refuses = "it takes none at the moment"

    def end() -> None:
        world.server.refuses = ""

    for_s(world, 0.1, 1.0, end)


def fail_over(world: World) -> None:
    """Another server stands in for the store, and lacks what was confirmed last."""
    lost = world.server.fail_over(world.rnd.randint(0, LOST_MAX))
    world.trace("lost", lost)


def jump(world: World) -> None:
    """A daemon's clock jumps, and comes back."""
    node = _node(world)
    node.jump(world.rnd.randint(-JUMP_MS, JUMP_MS))
    for_s(world, 0.2, 2.0, lambda: node.jump(0))


def kill_client(world: World | WholeWorld) -> None:
    """A consumer or the worker is killed, and started again."""
    program = world.rnd.choice([item for item in world.programs if "producer" not in item.name])
    if program.host.is_alive:
        program.kill()
        for_s(world, 0.05, 1.0, lambda: program.host.is_alive or program.start())


def freeze_client(world: World | WholeWorld) -> None:
    """A client stands still, perhaps for longer than its leases."""
    host = world.rnd.choice(world.programs).host
    host.freeze()
    for_s(world, 0.1, 2.5, host.thaw)


LONG_S = (1.5, 3.5)
"""Longer than a lease, so that another daemon leads meanwhile."""


def _spell_s(world: World) -> tuple[float, float]:
    return LONG_S if world.rnd.random() < 0.5 else (0.1, 1.0)


FAULTS: dict[str, Callable[[World], None]] = {
    fault.__name__: fault
    for fault in (
        kill, power_cut, freeze, drain, hand_over, cut, cut_off_from_store, cut_off_from_client,
        slow_network, slow_store, standing_store, refusing_store, jump, kill_client, freeze_client,
    )
}  # fmt: skip
FAILING_OVER: dict[str, Callable[[World], None]] = {
    fault.__name__: fault
    for fault in (fail_over, slow_network, slow_store, refusing_store, kill_client, freeze_client)
}
"""For runs whose store loses what it had confirmed: only a leader that lives on has it still."""
GENTLE: dict[str, Callable[[World], None]] = {hand_over.__name__: hand_over}
