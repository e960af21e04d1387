"""Real groups of Redis servers for tests: a master with replicas under Sentinels, and a Cluster.

Both fail over by themselves and when they are told to; a Cluster also moves slots. Each process has
its own port and folder, as in ``redis_server``, and is ended by its number.
"""

from __future__ import annotations

import socket
import subprocess
import time
from binascii import crc_hqx
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hiredis

from support.ports import free_port
from support.redis_server import RedisServer, program
from support.waiting import until

NAME = "mymaster"
SLOTS = 16_384
TIMEOUT_S = 60.0
DOWN_AFTER_MS = 500
FAILOVER_TIMEOUT_MS = 2_000
NODE_TIMEOUT_MS = 1_000
FAILOVER_AGAIN_S = 5.5
"""Seconds after which a replica told to take over gives up."""
SWITCH_AGAIN_S = 4 * FAILOVER_TIMEOUT_MS / 1000
"""Seconds after which a Sentinel failover is over or abandoned."""
KEYS_A_MIGRATE = 100
MIGRATE_MS = 60_000
PERIODS = (
    "info-period", 300, "publish-period", 300, "ping-period", 200, "ask-period", 200,
    "min-link-reconnect-period", 300,
)  # fmt: skip
"""Periods of Sentinels in milliseconds, shortened from seconds."""


def ask(server: RedisServer, *args: str | bytes | int) -> Any:
    """Return the parsed reply to a command. Redis errors are values. Raise OSError."""
    return asked(server.port, server.password, *args)


def asked(port: int, password: str, *args: str | bytes | int, before: tuple[str, ...] = ()) -> Any:
    """Like ``ask``, with a command `before` it."""
    reader, reply = hiredis.Reader(), None
    commands = [item for item in (("AUTH", password) if password else (), before, args) if item]
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as connection:
        for command in commands:
            connection.sendall(hiredis.pack_command(tuple(command)))
            while (reply := reader.gets()) is False:
                data = connection.recv(1 << 16)
                if not data:
                    raise ConnectionResetError(f"no answer to {args[0]!r}")
                reader.feed(data)
    return reply


def asking(server: RedisServer, *args: str | bytes | int) -> Any:
    """Return the reply to a command after ASKING, as a client that follows ASK sends it."""
    return asked(server.port, server.password, *args, before=("ASKING",))


def info(server: RedisServer, section: str) -> dict[str, str]:
    """Return a section of INFO, or an empty map if the server is unreachable."""
    try:
        reply = ask(server, "INFO", section)
    except OSError:
        return {}
    if not isinstance(reply, bytes):
        return {}
    rows = (row.split(":", 1) for row in reply.decode().splitlines() if ":" in row)
    return dict(rows)


def named_port(server: RedisServer) -> int:
    """Return the port by which the group knows the server: the TLS port if it has one."""
    return int(server.options.get("tls-port", server.port))


def tls(certificate: Path) -> dict[str, str]:
    """Return settings of a server whose group uses TLS. Tests still query it in plain text."""
    return {
        "tls_port": str(free_port()),
        "tls_cert_file": str(certificate),
        "tls_key_file": str(certificate.with_name("key.pem")),
        "tls_ca_cert_file": str(certificate),
        "tls_auth_clients": "no",
        "tls_replication": "yes",
    }


def catch_up(master: RedisServer, *replicas: RedisServer) -> None:
    """Wait until the replicas have all the master's data."""
    offset = int(info(master, "replication")["master_repl_offset"])

    def has_all(replica: RedisServer) -> bool:
        answer = info(replica, "replication")
        is_linked = answer.get("master_link_status") == "up"
        return is_linked and int(answer["slave_repl_offset"]) >= offset

    until(lambda: all(map(has_all, replicas)))


def is_replica_of(server: RedisServer, master: RedisServer) -> bool:
    """Return whether the server follows the master and has all its data."""
    result = info(server, "replication")
    return (
        result.get("role") == "slave"
        and result.get("master_port") == str(named_port(master))
        and result.get("master_link_status") == "up"
    )


class _Sentinel:
    """A Sentinel process."""

    def __init__(self, folder: Path, master_port: int, certificate: Path | None = None) -> None:
        self.port = free_port()
        self.password = ""
        self._folder = folder
        how = {} if certificate is None else tls(certificate)
        self._extra = "".join(f"{name.replace('_', '-')} {how[name]}\n" for name in how)
        self.tls_port = int(how.get("tls_port", 0))
        self._master_port = master_port
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._folder.mkdir()
        config = self._folder / "sentinel.conf"
        config.write_text(
            f"port {self.port}\nbind 127.0.0.1\ndir {self._folder}\nlogfile {self._folder}/log\n"
            f"sentinel monitor {NAME} 127.0.0.1 {self._master_port} 2\n"
            f"sentinel down-after-milliseconds {NAME} {DOWN_AFTER_MS}\n"
            f"sentinel failover-timeout {NAME} {FAILOVER_TIMEOUT_MS}\n"
            f"sentinel parallel-syncs {NAME} 2\n{self._extra}"
        )
        self._process = subprocess.Popen(
            [program(), str(config), "--sentinel"], stdin=subprocess.DEVNULL
        )
        until(lambda: self._is_up())
        self.ask("SENTINEL", "DEBUG", *PERIODS)

    def _is_up(self) -> bool:
        try:
            self.ask("PING")
        except OSError:
            return False
        return True

    def ask(self, *args: str | int) -> Any:
        return asked(self.port, self.password, *args)

    def signal(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class SentinelGroup:
    """A master, its replicas, and three Sentinels."""

    def __init__(self, folder: Path, replicas: int = 2, certificate: Path | None = None) -> None:
        names = ("a", "b", "c")[: replicas + 1]
        self._certificate = certificate
        self.servers = [
            RedisServer(folder / name, **(tls(certificate) if certificate else {}))
            for name in names
        ]
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.sentinels: list[_Sentinel] = []

    def url(self, query: str = "", user: str = "") -> str:
        seeds = ",".join(
            f"127.0.0.1:{sentinel.tls_port or sentinel.port}" for sentinel in self.sentinels
        )
        scheme = "redis" if self._certificate is None else "rediss"
        return f"{scheme}+sentinel://{user}{seeds}/0?master={NAME}{'&' if query else ''}{query}"

    def start(self) -> SentinelGroup:
        first, *replicas = self.servers
        first.start()
        for server in replicas:
            server.start()
            ask(server, "REPLICAOF", "127.0.0.1", named_port(first))
        until(lambda: all(is_replica_of(replica, first) for replica in replicas))
        for number in range(3):
            folder = self.folder / f"sentinel-{number}"
            one = _Sentinel(folder, named_port(first), self._certificate)
            self.sentinels.append(one)
            one.start()
        until(self._is_ready)
        return self

    def _is_ready(self) -> bool:
        """Return whether every Sentinel knows all servers and can fail over."""
        for sentinel in self.sentinels:
            reply = sentinel.ask("SENTINEL", "MASTER", NAME)
            if isinstance(reply, Exception):
                return False
            state = dict(zip(reply[::2], reply[1::2], strict=True))
            if (int(state[b"num-slaves"]), int(state[b"num-other-sentinels"])) != (
                len(self.servers) - 1, 2,
            ) or state[b"flags"] != b"master":  # fmt: skip
                return False
        return True

    def stop(self) -> None:
        for item in (*self.sentinels, *self.servers):
            item.kill()

    def named(self) -> set[int]:
        """Return the master ports that the Sentinels name."""
        replies = [
            sentinel.ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", NAME) for sentinel in self.sentinels
        ]
        return {int(reply[1]) for reply in replies}

    @property
    def master(self) -> RedisServer:
        """Return the master that all Sentinels agree on."""
        return until(self._master)

    def _master(self, but: RedisServer | None = None) -> RedisServer | None:
        ports = self.named()
        for server in [item for item in self.servers if item is not but]:
            if (
                ports == {named_port(server)}
                and info(server, "replication").get("role") == "master"
            ):
                return server
        return None

    def moved_from(self, before: RedisServer) -> RedisServer:
        """Wait for another master and return it."""
        return until(lambda: self._master(but=before))

    def switch(self) -> RedisServer:
        """Tell a Sentinel to fail over, and return the new master."""
        before, asked_s = self.master, float("-inf")

        def moved() -> RedisServer | None:
            nonlocal asked_s
            # A Sentinel that says OK may give up: on a busy machine it knows no replica of which it
            # has heard lately enough.
            is_time = time.monotonic() > asked_s + SWITCH_AGAIN_S
            if is_time and self.sentinels[0].ask("SENTINEL", "FAILOVER", NAME) == b"OK":
                asked_s = time.monotonic()
            return self._master(but=before)

        return until(moved)

    def is_whole(self) -> bool:
        """Return whether all other servers follow the master."""
        master = self._master()
        others = [server for server in self.servers if server is not master]
        return master is not None and all(is_replica_of(other, master) for other in others)

    def heal(self) -> None:
        """Wait until all servers run, follow the master, and can be promoted."""
        for server in self.servers:
            server.go_on()
            if not info(server, "server"):
                server.start(loaded=False)
        until(lambda: self.is_whole() and self._is_ready())


class _Node(RedisServer):
    """A node of a Cluster."""

    def __init__(self, folder: Path, **options: str) -> None:
        how = {
            "cluster_enabled": "yes",
            "cluster_node_timeout": str(NODE_TIMEOUT_MS),
            "cluster_config_file": "nodes.conf",
            # A node that was cut off can be chosen, because it keeps its replication offset.
            "cluster_replica_validity_factor": "0",
            "cluster_allow_replica_migration": "no",
        }
        super().__init__(folder, **how | options)


class Cluster:
    """Three masters with one replica each."""

    def __init__(
        self, folder: Path, replicas: int = 1, certificate: Path | None = None, **options: str
    ) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        count = 3 * (1 + replicas)
        self._certificate = certificate
        if certificate is not None:
            options["tls_cluster"] = "yes"
        self.nodes = [
            _Node(folder / f"node-{n}", **options | (tls(certificate) if certificate else {}))
            for n in range(count)
        ]
        self._ids: dict[int, str] = {}

    def url(self, query: str = "", user: str = "", seeds: int = 2) -> str:
        named = ",".join(f"127.0.0.1:{named_port(node)}" for node in self.nodes[:seeds])
        scheme = "redis" if self._certificate is None else "rediss"
        return f"{scheme}+cluster://{user}{named}/{'?' if query else ''}{query}"

    def start(self) -> Cluster:
        for number, node in enumerate(self.nodes):
            node.start(loaded=False)
            ask(node, "CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            self._ids[node.port] = ask(node, "CLUSTER", "MYID").decode()
        masters, replicas = self.nodes[:3], self.nodes[3:]
        for number, node in enumerate(masters):
            first, last = number * SLOTS // 3, (number + 1) * SLOTS // 3 - 1
            ask(node, "CLUSTER", "ADDSLOTSRANGE", first, last)
        for node in self.nodes[1:]:
            ask(self.nodes[0], "CLUSTER", "MEET", "127.0.0.1", named_port(node))
        until(lambda: all(self._knows_all(node) for node in self.nodes))
        for number, node in enumerate(replicas):
            self._follow(node, masters[number % 3])
        until(self.is_whole)
        return self

    def _follow(self, node: RedisServer, master: RedisServer) -> None:
        until(lambda: ask(node, "CLUSTER", "REPLICATE", self._ids[master.port]) == b"OK")

    def stop(self) -> None:
        for node in self.nodes:
            node.kill()

    def _knows_all(self, node: RedisServer) -> bool:
        rows = ask(node, "CLUSTER", "NODES").decode().splitlines()
        return len(rows) == len(self.nodes) and all("handshake" not in row for row in rows)

    def _view(self, node: RedisServer) -> Any:
        """Return slots and master ports as this node sees them, or None if slots are unserved."""
        try:
            state, slots = ask(node, "CLUSTER", "INFO"), ask(node, "CLUSTER", "SLOTS")
        except OSError:
            return None
        if isinstance(state, Exception) or b"cluster_state:ok" not in state:
            return None
        return None if isinstance(slots, Exception) else [(*row[:2], row[2][1]) for row in slots]

    def masters(self) -> list[RedisServer]:
        """Return the reachable masters."""
        return [node for node in self.nodes if info(node, "replication").get("role") == "master"]

    def is_whole(self) -> bool:
        """Return whether all nodes agree and every replica follows its master."""
        views = [self._view(node) for node in self.nodes]
        if views[0] is None or any(view != views[0] for view in views):
            return False
        rows = ask(self.nodes[0], "CLUSTER", "NODES").decode().splitlines()
        if any("fail" in row.split()[2] or row.split()[7] != "connected" for row in rows):
            return False
        roles = [info(node, "replication") for node in self.nodes]
        links = [role["master_link_status"] == "up" for role in roles if role["role"] == "slave"]
        return len(links) == len(self.nodes) - 3 and all(links)

    def heal(self) -> None:
        """Wait until all nodes run and follow their masters."""
        for node in self.nodes:
            node.go_on()
            if not info(node, "server"):
                node.start(loaded=False)
        until(self.is_whole)

    def owner_of(self, slot: int, seen_by: RedisServer | None = None) -> RedisServer | None:
        """Return the node of a slot, as a reachable node sees it."""
        for node in [seen_by] if seen_by else self.nodes:
            try:
                rows = ask(node, "CLUSTER", "SLOTS")
            except OSError:
                continue
            if isinstance(rows, Exception):
                continue
            for first, last, (_, port, *_), *_ in rows:
                if first <= slot <= last:
                    return next(item for item in self.nodes if item.port == port)
        return None

    def replica_of(self, master: RedisServer) -> RedisServer:
        """Return a replica that has all of this master's data."""
        return until(lambda: next((n for n in self.nodes if is_replica_of(n, master)), None))

    def switch(self, slot: int, how: str = "") -> RedisServer:
        """Tell a replica to replace its master, and return the new master."""
        before = self.owner_of(slot)
        assert before is not None
        replica = self.replica_of(before)
        told_s = 0.0

        def look() -> bool:
            nonlocal told_s
            if self.owner_of(slot, replica) is replica:
                return True
            if time.monotonic() > told_s + FAILOVER_AGAIN_S:  # given up, or not elected
                told_s = time.monotonic()
                ask(replica, "CLUSTER", "FAILOVER", *([how] if how else []))
            return False

        until(look)
        return replica

    def moved_from(self, before: RedisServer, slot: int) -> RedisServer:
        """Wait until all reachable nodes name another master of the slot, and return it."""

        others = [node for node in self.nodes if node is not before]

        def look() -> RedisServer | None:
            seen = {self.owner_of(slot, node) for node in others}
            return seen.pop() if len(seen) == 1 and before not in seen else None

        return until(look, log=lambda: "\n".join(map(_told, others)))

    # --- moving a slot, as redis-cli --cluster reshard does ------------------------------------

    def migrate(
        self,
        slot: int,
        to: RedisServer,
        *,
        keys_at_once: int = KEYS_A_MIGRATE,
        between: Callable[[str], None] = lambda step: None,
        auth: tuple[str, ...] = (),
    ) -> float:
        """Move a slot with its keys, calling `between` after each step. Return the seconds it
        took."""
        source = self.owner_of(slot)
        assert source is not None and source is not to
        began_s = time.monotonic()
        for node, word, other in ((to, "IMPORTING", source), (source, "MIGRATING", to)):
            reply = ask(node, "CLUSTER", "SETSLOT", slot, word, self._ids[other.port])
            assert reply == b"OK", reply
        between("marked")
        while keys := ask(source, "CLUSTER", "GETKEYSINSLOT", slot, keys_at_once):
            reply = ask(
                source,
                "MIGRATE",
                "127.0.0.1",
                named_port(to),
                "",
                0,
                MIGRATE_MS,
                *auth,
                "KEYS",
                *keys,
            )
            assert reply in (b"OK", b"NOKEY"), reply
            between("some")
        between("all")
        for node in (
            to,
            source,
            *(master for master in self.masters() if master not in (to, source)),
        ):
            reply = ask(node, "CLUSTER", "SETSLOT", slot, "NODE", self._ids[to.port])
            assert reply == b"OK", reply
        return time.monotonic() - began_s


def _told(node: RedisServer) -> str:
    """Return the end of a node's log, which tells of elections and votes."""
    return f"{node.port}: {(node.folder / 'log').read_text(errors='replace')[-1500:]}"


def slot_of(tag: str) -> int:
    """Return the slot of keys with this hash tag."""
    return crc_hqx(tag.encode(), 0) % SLOTS
