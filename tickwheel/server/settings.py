"""Settings of the daemon: flags win over environment (``TICKWHEEL_*``) over the TOML file.

Every number has its unit in its name and a default that a mature system would choose.
"""

from __future__ import annotations

import os
import socket
import tomllib
from difflib import get_close_matches
from ipaddress import ip_address, ip_network
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from tickwheel import environment
from tickwheel.engine.state import EngineConfig
from tickwheel.engine.topics import DELIVERY_BYTES, FRAME_HEAD_BYTES
from tickwheel.errors import BadRequest, shown
from tickwheel.history.daemon import HistoryOptions
from tickwheel.history.spool import BYTES_MAX
from tickwheel.history.writer import CLEAN_HOUR, DISK_CLEAN, DISK_WARN, RETENTION_S, SEGMENT_BYTES
from tickwheel.limits import DELAY_LEVELS, SHARDS_MAX, Limits, parse_delay_levels
from tickwheel.model.policies import InvalidPolicy, RetryPolicy, named_policies
from tickwheel.model.records import TRACE_LENGTH_MAX
from tickwheel.server.shard.callers import TOKEN_TEXT

TASK_EXTRAS_BYTES = 64 * 1024
"""What a task may have beside the largest body, unless ``task_bytes_max`` says otherwise."""
FRAME_BYTES = 1024 * 1024
"""A DELIVER frame is not made larger than this, except by a task that alone is."""
DISPATCH_BYTES = 16 * 1024 * 1024
"""So much is handed out before the event loop gets its turn."""
HOT_BYTES_MAX = 256 * 1024 * 1024
"""Bodies of tasks that are due soon or ready, unless ``resident_bytes_max`` says otherwise."""
REDIS_RESIDENT_BYTES_MAX = 2 * 1024 * 1024 * 1024
"""With Redis every body stays in memory, so that a Redis that lost it gets it back."""


class Settings(BaseSettings):
    """What can be set of ``tickwheel serve``."""

    model_config = SettingsConfigDict(
        env_prefix=environment.PREFIX, env_ignore_empty=True, extra="forbid", frozen=True
    )

    # where
    store: str = "sqlite:///tickwheel.db"
    expect_store: bool = False
    """Refuse to start with a store that is empty: it was lost. For once it has been laid out."""
    expect_standbys: int = Field(default=0, ge=0, le=64)
    """Standbys of each shard that should be seen; fewer are a trouble, and an alert."""
    expect_nodes: int = Field(default=0, ge=0, le=1_000)
    """Nodes that should be seen, this one included."""
    listen: str = "tcp://127.0.0.1:7355"
    http: str | None = None
    processes: int | Literal["auto"] = 1
    """A daemon for each shard of a store that is a folder; "auto": one for each processor."""
    http_all: str | None = None
    """Where health, metrics and addresses of all shards together are answered."""
    route: str = ""
    """Of a daemon that ``processes`` has started: the addresses of all shards, in their order."""
    moved_id: int = Field(default=0, ge=0)
    """Of such a daemon: tasks with ids up to this may be in any shard."""
    node: str = Field(default_factory=socket.gethostname)
    node_capacity: float = Field(default=1.0, ge=0.01, le=1_000)
    """Of a node (``?shards=N``): how many shards it gets, beside the capacity of the others."""
    serve_token: str | None = Field(default=None, repr=False)
    """Whoever shows it may do all. Not ``token``: ``TICKWHEEL_TOKEN`` is what a client shows."""
    tokens_file: str | None = None
    """Tokens with rights of their own; None: there is ``serve_token`` only."""
    audit_file: str | None = None
    """What operators do is written there."""
    audit_bytes_max: int = Field(default=64 * 1024 * 1024, ge=64 * 1024)
    """Of that file, and of the one before it."""
    quota_tasks_per_s: float | None = Field(default=None, gt=0)
    """This and the next: of each token that says nothing else."""
    quota_bytes_per_s: float | None = Field(default=None, gt=0)
    quota_pending: int | None = Field(default=None, gt=0)
    quota_connections: int | None = Field(default=None, gt=0)
    quota_subscriptions: int | None = Field(default=None, gt=0)
    quota_transactions: int | None = Field(default=None, gt=0)
    login_delay_s: float = Field(default=0.25, ge=0, le=10)
    """Before a wrong token is answered."""
    tls_cert: str | None = None
    """PEM; the chain, its own certificate first."""
    tls_key: str | None = None
    """None: it is in the file of ``tls_cert``."""
    tls_client_ca: str | None = None
    """Who signs the certificates of clients; None: clients are not asked for any."""
    tls_client_required: bool = False
    tls_handshake_timeout_s: float = Field(default=5.0, gt=0, le=600)
    tls_handshakes_max: int = Field(default=256, gt=0)
    """Of one port, under way."""
    tls_handshakes_per_s: float = Field(default=500.0, gt=0)
    """Of one port, begun."""
    http_hosts: str = ""
    """Names, separated by commas, by which a port without tokens may be asked."""
    insecure: bool = False
    """Listen beyond this machine without tokens or without TLS."""
    push_allow: str = ""
    """Networks, separated by commas, that targets may be in though they are not public."""
    backup_dir: str | None = None
    ready_file: str | None = None
    file_mode: Literal["0600", "0640", "0644"] = "0640"
    """At most this mode has each file that the daemon makes; folders, with the right to enter."""
    # failover
    advertise: str | None = None
    http_advertise: str | None = None
    leader_ttl_s: float = Field(default=3.0, ge=0.2, le=3_600)
    store_wait_s: float | None = Field(default=None, ge=0, le=3_600)
    """At a start, for a Redis that does not answer; None: for as long as it takes."""
    allow_volatile_store: bool = False
    # room
    disk_refuse: float = Field(default=0.90, gt=0, le=1)
    """SQLite: new tasks are refused while more of its disk than this share is used."""
    # logs and metrics
    log_format: Literal["console", "json"] = "console"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    metrics_topics_max: int = Field(default=1_000, ge=0)
    """So many topics, and so many pairs of topic and group, have series of their own."""
    metrics_lateness_topics_max: int = Field(default=100, ge=0)
    otlp_endpoint: str | None = None
    """Where spans and metrics go by OTLP over HTTP, without ``/v1/…``; None: nowhere."""
    otlp_headers_file: str | None = None
    """Headers for it, one ``Name: value`` a line."""
    otlp_interval_s: float = Field(default=60.0, ge=1, le=86_400)
    """Between two times at which metrics are sent."""
    trace_sample: float = Field(default=0.01, ge=0, le=1)
    """The share of the traces that producers sample of which the daemon makes spans, too."""
    # the wheel
    slots: int = Field(default=3600, ge=2, le=1_000_000)
    tick_ms: int = Field(default=1000, ge=1, le=3_600_000)
    shard: int = Field(default=0, ge=0, le=1023)
    delay_max_s: float = Field(default=10 * 365.25 * 86_400, gt=0)
    within_max_s: float = Field(default=86_400, gt=0)
    delay_levels: str = DELAY_LEVELS
    """The delays of level 1, 2, …, separated by spaces; units s, m, h, d."""
    clock_hold_over_s: float = Field(default=86_400.0, gt=0)
    clock_hold_start_over_s: float = Field(default=7 * 86_400.0, ge=7_200)
    """More than an idle daemon's stored time may be old."""
    accept_clock: bool = False
    resident_horizon_s: float = Field(default=60.0, ge=0)
    resident_bytes_max: int | None = Field(default=None, gt=0)
    # delivery
    lease_default_s: float = Field(default=30.0, gt=0)
    lease_max_s: float = Field(default=43_200.0, gt=0)
    lease_checkpoint_s: float = Field(default=0.1, ge=0)
    reconnect_grace_s: float = Field(default=5.0, ge=0)
    deaths_max: int = Field(default=3, ge=1, le=1_000)
    death_retry_base_s: float = Field(default=1.0, ge=0.001, le=86_400)
    death_retry_cap_s: float = Field(default=60.0, ge=0.001, le=86_400)
    retry_base_s: float = Field(default=10.0, ge=0)
    retry_factor: float = Field(default=2.0, ge=1)
    retry_cap_s: float = Field(default=7_200.0, ge=0)
    retry_max: int = Field(default=16, ge=0, le=1_000_000)
    retry_jitter: float = Field(default=0.1, ge=0, le=1)
    retry_policies: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Policies by name, each as on the wire: {"kind": "fixed", "delay_ms": 5000, …}."""
    failure_trace_length_max: int = Field(default=TRACE_LENGTH_MAX, ge=0, le=32_768)
    dead_retention_s: float = Field(default=14 * 86_400.0, gt=0)
    group_unused_report_s: float = Field(default=7 * 86_400.0, gt=0)
    group_unused_end_s: float | None = Field(default=None, gt=0)
    """None: never."""
    broadcast_tasks_max: int = Field(default=10_000, gt=0)
    broadcast_bytes_max: int = Field(default=32 * 1024 * 1024, gt=0)
    broadcasts_bytes_max: int = Field(default=256 * 1024 * 1024, gt=0)
    prefetch_max: int = Field(default=65_535, gt=0)
    pull_max: int = Field(default=1_024, gt=0)
    # history and backups
    history_dir: str | None = None
    report_dir: str | None = None
    """Where ``tickwheel report --out DIR`` writes its page; the console shows it."""
    history_bodies: bool = False
    history_segment_bytes: int = Field(default=SEGMENT_BYTES, ge=4_096)
    history_spool_bytes_max: int = Field(default=BYTES_MAX, ge=65_536)
    history_retention_s: float = Field(default=RETENTION_S, gt=0)
    history_bytes_max: int | None = Field(default=None, gt=0)
    history_disk_warn: float = Field(default=DISK_WARN, gt=0, le=1)
    history_disk_clean: float = Field(default=DISK_CLEAN, gt=0, le=1)
    """Shares of the disk with the history that may be used; 1: off."""
    history_clean_hour: int = Field(default=CLEAN_HOUR, ge=0, le=23)
    backup_daily_hour: int | None = Field(default=None, ge=0, le=23)
    """By local time. None: no daily backups."""
    backup_keep: int = Field(default=7, ge=1)
    # limits
    frame_bytes_max: int = Field(default=4 * 1024 * 1024, ge=1024)
    body_bytes_max: int = Field(default=1024 * 1024, gt=0)
    task_bytes_max: int | None = Field(default=None, gt=0)
    """None: ``body_bytes_max`` and 64 KiB."""
    property_value_bytes_max: int = Field(default=4_096, gt=0)
    tasks_per_frame_max: int = Field(default=16_384, gt=0)
    connections_max: int = Field(default=4_096, gt=0)
    http_connections_max: int = Field(default=1_024, gt=0)
    http_body_bytes_max: int | None = Field(default=None, gt=0)
    """Of one request over HTTP, or of one line. None: twice the largest task."""
    http_bodies_bytes_max: int = Field(default=64 * 1024 * 1024, gt=0)
    """Of all requests over HTTP that are being read or worked on."""
    http_body_timeout_s: float = Field(default=30.0, gt=0)
    http_wait_max_s: float = Field(default=60.0, ge=0)
    """Of a pull over HTTP: what lies between gives up a request without an answer sooner."""
    http_idle_timeout_s: float = Field(default=5.0, gt=0)
    subscriptions_max: int = Field(default=1_024, gt=0)
    pulls_max: int = Field(default=1_024, gt=0)
    subscribers_max: int = Field(default=100_000, gt=0)
    window_max: int = Field(default=1_024, gt=0)
    sessions_max: int = Field(default=100_000, gt=0)
    session_outcomes_max: int = Field(default=1_000_000, gt=0)
    outcomes_per_session_max: int = Field(default=131_072, gt=0)
    topics_max: int = Field(default=100_000, gt=0)
    groups_per_topic_max: int = Field(default=1_000, gt=0)
    groups_max: int = Field(default=200_000, gt=0)
    tasks_max: int = Field(default=100_000_000, gt=0)
    scheduled_max: int = Field(default=100_000_000, gt=0)
    backlog_max: int = Field(default=20_000_000, gt=0)
    acks_ahead_max: int = Field(default=4_096, ge=0)
    """Ends of deliveries of one subscription that give credit back before they are durable."""
    ack_gather_ms: int = Field(default=10, ge=0, le=1_000)
    """How long an ack for whose answer nobody waits may wait for others; 0: it never does."""
    schedules_max: int = Field(default=10_000, ge=0)
    schedule_bytes_max: int = Field(default=64 * 1024, gt=0)
    """Body and options of one schedule."""
    schedule_interval_min_s: float = Field(default=1.0, ge=0.1)
    transactions_max: int = Field(default=10_000, ge=0)
    """That are not decided."""
    transactions_bytes_max: int = Field(default=64 * 1024 * 1024, gt=0)
    """Of the half tasks of all of them."""
    transaction_tasks_max: int = Field(default=10_000, gt=0)
    transaction_bytes_max: int = Field(default=4 * 1024 * 1024, gt=0)
    transaction_check_s: float = Field(default=60.0, gt=0)
    """So long after a transaction was heard of last, its producer group is asked about it,"""
    transaction_check_every_s: float = Field(default=60.0, gt=0)
    """and so often again,"""
    transaction_checks_max: int = Field(default=15, ge=1)
    """so many times; then it is parked."""
    transactions_remembered_max: int = Field(default=100_000, ge=0)
    """Decided ones, for a repeated commit or rollback,"""
    transactions_remembered_s: float = Field(default=3_600.0, gt=0)
    """for so long."""
    bulk_max: int = Field(default=100, ge=0)
    """That are running."""
    bulk_remembered_max: int = Field(default=1_000, ge=0)
    """Ended ones, and what became of them,"""
    bulk_remembered_s: float = Field(default=604_800.0, gt=0)
    """for so long."""
    resets_max: int = Field(default=10, ge=0)
    """Groups that are being reset, and as many dry runs that are not answered."""
    reset_plan_bytes_max: int = Field(default=4 * 1024**3, gt=0)
    """On disk: what one of them is to give, with the bodies."""
    snoozes_max: int = Field(default=1_000, ge=0)
    """Times that one group may postpone one task."""
    in_flight_max: int = Field(default=2_000_000, gt=0)
    staged_bytes_max: int = Field(default=64 * 1024 * 1024, gt=0)
    commands_max: int = Field(default=10_000, gt=0)
    command_ids_max: int = Field(default=500_000, gt=0)
    listings_max: int = Field(default=64, gt=0)
    listings_all_max: int = Field(default=1_024, gt=0)
    backups_max: int = Field(default=4, gt=0)
    history_lookups_max: int = Field(default=16, gt=0)
    replies_bytes_max: int = Field(default=4 * 1024 * 1024, gt=0)
    replies_all_bytes_max: int = Field(default=128 * 1024 * 1024, gt=0)
    unread_bytes_max: int = Field(default=512 * 1024 * 1024, gt=0)
    out_bytes_soft: int = Field(default=4 * 1024 * 1024, gt=0)
    out_bytes_max: int = Field(default=32 * 1024 * 1024, ge=65_536)
    slow_reader_timeout_s: float = Field(default=30.0, gt=0)
    endings_max: int = Field(default=100_000, gt=1)
    heartbeat_interval_s: float = Field(default=10.0, ge=0.1, le=86_400)
    heartbeat_timeout_s: float = Field(default=30.0, ge=0.2, le=86_400)
    hello_timeout_s: float = Field(default=10.0, gt=0)
    outcome_timeout_s: float = Field(default=2.5, gt=0)
    drain_timeout_s: float = Field(default=10.0, gt=0)

    @field_validator("processes", mode="before")
    @classmethod
    def _processes(cls, value: Any) -> Any:
        is_number = type(value) is int or (type(value) is str and value.isdecimal())
        if value != "auto" and not (is_number and 1 <= int(value) <= SHARDS_MAX):
            raise ValueError(f"must be auto, or a whole number of 1 to {SHARDS_MAX}")
        return value if value == "auto" else int(value)

    @field_validator("listen")
    @classmethod
    def _listen(cls, value: str) -> str:
        _scheme(value, "listen", ("tcp", "tls"))
        return value

    @field_validator("push_allow", mode="before")
    @classmethod
    def _push_allow_many(cls, value: Any) -> Any:
        """An option that is repeated gives a list."""
        return ",".join(value) if isinstance(value, list) else value

    @field_validator("push_allow")
    @classmethod
    def _push_allow(cls, value: str) -> str:
        for text in filter(None, value.split(",")):
            ip_network(text.strip())
        return value

    @field_validator("delay_levels")
    @classmethod
    def _levels(cls, value: str) -> str:
        parse_delay_levels(value)
        return value

    @field_validator("retry_policies")
    @classmethod
    def _retry_policies(cls, value: dict[str, Any]) -> dict[str, Any]:
        try:
            named_policies(value, RetryPolicy())
        except InvalidPolicy as error:
            raise ValueError(error.message(shown)) from None
        return value

    @field_validator("advertise")
    @classmethod
    def _advertise(cls, value: str | None) -> str | None:
        if value is not None:
            _scheme(value, "advertise", ("tcp", "tls"))
        return value

    @field_validator("http", "http_all", "http_advertise")
    @classmethod
    def _http(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None:
            _scheme(value, str(info.field_name), ("http", "https"))
        return value

    @model_validator(mode="after")
    def _tls(self) -> Self:
        """A certificate that protects nothing, or a port without one, is a mistake."""
        ports = [name for name in ("listen", "http", "http_all") if self.speaks_tls(name)]
        if ports and self.tls_cert is None:
            raise ValueError(f"{ports[0]} ({getattr(self, ports[0])}) needs tls_cert")
        for name in ("tls_key", "tls_client_ca", "tls_client_required"):
            if getattr(self, name) and self.tls_cert is None:
                raise ValueError(f"{name} needs tls_cert")
        if self.tls_cert is not None and not ports:
            raise ValueError(
                "tls_cert is set and no port speaks TLS: write tls:// in listen, or https:// in"
                " http"
            )
        if self.tls_client_required and self.tls_client_ca is None:
            raise ValueError("tls_client_required needs tls_client_ca")
        return self

    @model_validator(mode="after")
    def _exposed(self) -> Self:
        """Who is reached by others needs tokens, and TLS so that these stay secret."""
        has_tokens = self.serve_token is not None or self.tokens_file is not None
        is_open = not has_tokens and not self.tls_client_required
        for name in ("listen", "http", "http_all"):
            address = getattr(self, name)
            if self.insecure or address is None or _is_local(split_address(address, name)[0]):
                continue
            missing = ["tokens (serve_token, tokens_file)"] if is_open else []
            missing += [] if self.speaks_tls(name) else ["TLS (tls_cert)"]
            if missing:
                raise ValueError(
                    f"{name} ({address}) is open to other machines, without"
                    f" {' and without '.join(missing)}; see docs/security.md, or say insecure"
                    " (--insecure)"
                )
        return self

    @model_validator(mode="after")
    def _http_of_all(self) -> Self:
        """It asks the daemons of the shards, at their own ports of HTTP."""
        if self.http_all is None:
            return self
        if self.processes == 1:
            raise ValueError(
                f"http_all ({self.http_all}) is of several shards, and processes is 1: one daemon"
                " has http"
            )
        if self.http is None:
            raise ValueError(f"http_all ({self.http_all}) needs http: it asks each shard there")
        return self

    @model_validator(mode="after")
    def _serve_token(self) -> Self:
        """A token with rights of its own, also a revoked one, would open everything."""
        if self.tokens_file is None or self.serve_token is None:
            return self
        if TOKEN_TEXT.match(self.serve_token):
            raise ValueError(
                "serve_token has the form of a token of tokens_file (tw_ID_SECRET): whoever has"
                " that token, also after it was revoked, could do everything; give another value"
            )
        return self

    @property
    def http_names(self) -> frozenset[str] | None:
        """By which the HTTP port may be asked while it asks for no token; None: by any, as it is
        reached from elsewhere and nobody has said by which."""
        given = {name.strip().rstrip(".").lower() for name in self.http_hosts.split(",")} - {""}
        host = split_address(self.http, "http")[0] if self.http is not None else ""
        if not given and not _is_local(host):
            return None
        return frozenset(given | {host.lower()})

    @property
    def shard_urls(self) -> tuple[str, ...]:
        """``route``, one by one; empty: this daemon has the only shard."""
        return tuple(filter(None, self.route.split(",")))

    @property
    def push_networks(self) -> tuple[str, ...]:
        """``push_allow``, one by one."""
        return tuple(text.strip() for text in self.push_allow.split(",") if text.strip())

    def speaks_tls(self, port: str) -> bool:
        """Whether ``listen``, ``http`` or ``http_all`` does."""
        address = getattr(self, port)
        return address is not None and address.startswith(("tls://", "https://"))

    @property
    def http_url(self) -> str | None:
        """``http`` as a URL."""
        return self.http if self.http is None or "://" in self.http else f"http://{self.http}"

    def http_for_others(self, bound: str) -> str:
        """The URL at which others find this daemon's HTTP, which listens at ``bound``. One that
        listens at every address of its machine has the host of ``advertise``."""
        if self.http_advertise is not None:
            scheme = "https" if self.speaks_tls("http") else "http"
            has_scheme = "://" in self.http_advertise
            return self.http_advertise if has_scheme else f"{scheme}://{self.http_advertise}"
        host, port = split_address(bound, "http")
        if self.advertise is None or host not in EVERY_ADDRESS:
            return bound
        host = split_address(self.advertise, "advertise")[0]
        return f"{bound.partition('://')[0]}://{f'[{host}]' if ':' in host else host}:{port}"

    @field_validator("otlp_endpoint")
    @classmethod
    def _otlp_url(cls, value: str | None) -> str | None:
        if not value:
            return None
        url = urlsplit(value)
        has_more = url.query or url.fragment or url.username
        if url.scheme not in ("http", "https") or not url.hostname or has_more or url.port == 0:
            raise ValueError("otlp_endpoint must be http://HOST:PORT or https://HOST:PORT")
        return value

    @model_validator(mode="after")
    def _levels_within(self) -> Self:
        highest_ms = max(self.delay_levels_ms)
        if highest_ms > self.delay_max_s * 1000:
            raise ValueError(
                f"delay_levels has one of {highest_ms} ms, which is longer than delay_max_s"
                f" ({self.delay_max_s:g} s)"
            )
        return self

    @model_validator(mode="after")
    def _disk_shares(self) -> Self:
        """Who cleans before it warns, or refuses before it cleans, has mixed them up."""
        names = ("history_disk_warn", "history_disk_clean", "disk_refuse")
        shares = [(name, getattr(self, name)) for name in names]
        on = [(name, share) for name, share in shares if share < 1]
        if self.history_dir is not None:
            for (low, lower), (high, higher) in pairwise(on):
                if lower > higher:
                    raise ValueError(
                        f"{low} ({lower:g}) must not be above {high} ({higher:g}); 1 turns one off"
                    )
        return self

    @model_validator(mode="after")
    def _frames_fit(self) -> Self:
        """A task that a producer may send can be sent to a consumer, however far it is behind."""
        largest = self.largest_task_bytes + DELIVERY_BYTES + FRAME_HEAD_BYTES
        if largest > self.out_room_bytes // 4:
            raise ValueError(
                f"out_bytes_max ({self.out_bytes_max}) must be at least"
                f" {8 * largest} for tasks of {self.largest_task_bytes} bytes"
                " (body_bytes_max, task_bytes_max, frame_bytes_max)"
            )
        return self

    @model_validator(mode="after")
    def _unused_groups(self) -> Self:
        end_s, report_s = self.group_unused_end_s, self.group_unused_report_s
        if end_s is not None and end_s < report_s:
            raise ValueError(
                f"group_unused_end_s ({end_s:g}) must not be below group_unused_report_s"
                f" ({report_s:g}): a group is reported before it ends"
            )
        return self

    @model_validator(mode="after")
    def _heartbeats(self) -> Self:
        interval_s, timeout_s = self.heartbeat_interval_s, self.heartbeat_timeout_s
        if timeout_s < 2 * interval_s:
            raise ValueError(
                f"heartbeat_timeout_s ({timeout_s:g}) must be at least twice"
                f" heartbeat_interval_s ({interval_s:g}): one question may be late"
            )
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        sources = [init_settings]
        # Looking each setting up is most of what it costs to make them.
        if any(name.upper().startswith(environment.PREFIX) for name in os.environ):
            sources.append(env_settings)
        if settings_cls.model_config.get("toml_file") is not None:
            sources.append(TomlConfigSettingsSource(settings_cls))
        return tuple(sources)

    @property
    def delay_levels_ms(self) -> tuple[int, ...]:
        """``delay_levels``, level 1 first."""
        return parse_delay_levels(self.delay_levels)

    @property
    def out_bytes_stop(self) -> int:
        """``out_bytes_soft``, or less: what is under way when it is reached is still written."""
        return min(self.out_bytes_soft, self.out_bytes_max // 2)

    @property
    def out_room_bytes(self) -> int:
        """For what is written between ``out_bytes_stop`` and ``out_bytes_max``: a quarter
        for a dispatch, one for its last frame, one for what was handed out at most once, and one
        for answers."""
        return self.out_bytes_max - self.out_bytes_stop

    @property
    def largest_task_bytes(self) -> int:
        """``task_bytes_max``, or less: its frame of deliveries is within ``frame_bytes_max``."""
        asked = self.task_bytes_max or self.body_bytes_max + TASK_EXTRAS_BYTES
        return min(asked, self.frame_bytes_max - DELIVERY_BYTES - FRAME_HEAD_BYTES)

    @property
    def http_body_bytes(self) -> int:
        """``http_body_bytes_max``, or room for the largest task as base64 in JSON."""
        return self.http_body_bytes_max or 2 * self.largest_task_bytes

    def limits(self) -> Limits:
        """What a client gets in the answer to its HELLO."""
        return Limits(
            frame_bytes_max=self.frame_bytes_max,
            body_bytes_max=min(self.body_bytes_max, self.largest_task_bytes),
            task_bytes_max=self.largest_task_bytes,
            property_value_bytes_max=self.property_value_bytes_max,
            tasks_per_frame_max=self.tasks_per_frame_max,
            ids_per_frame_max=self.tasks_per_frame_max,
            delay_ms_max=int(self.delay_max_s * 1000),
            within_ms_max=int(self.within_max_s * 1000),
            window_max=self.window_max,
            pull_max=self.pull_max,
            prefetch_max=self.prefetch_max,
            lease_ms_max=int(self.lease_max_s * 1000),
            subscriptions_max=self.subscriptions_max,
            pulls_max=self.pulls_max,
            connections_max=self.connections_max,
        )

    def history(self, shard: int) -> HistoryOptions | None:
        """None: it is off."""
        if self.history_dir is None:
            return None
        return HistoryOptions(
            folder=self.history_dir,
            node=self.node,
            shard=shard,
            bodies=self.history_bodies,
            spool_bytes_max=self.history_spool_bytes_max,
            segment_bytes=self.history_segment_bytes,
            retention_s=self.history_retention_s,
            bytes_max=self.history_bytes_max,
            clean_hour=self.history_clean_hour,
            disk_warn=self.history_disk_warn,
            disk_clean=self.history_disk_clean,
        )

    def engine(self) -> EngineConfig:
        """The engine's share, in its units."""
        retry = RetryPolicy(
            base_ms=int(self.retry_base_s * 1000),
            factor=self.retry_factor,
            cap_ms=int(self.retry_cap_s * 1000),
            retries_max=self.retry_max,
            jitter=self.retry_jitter,
        )
        return EngineConfig(
            slots=self.slots,
            tick_ms=self.tick_ms,
            shard=self.shard,
            shards=len(self.shard_urls) or 1,
            moved_id=self.moved_id,
            retry=retry,
            policies=named_policies(self.retry_policies, retry),
            broadcast_tasks_max=self.broadcast_tasks_max,
            broadcast_bytes_max=self.broadcast_bytes_max,
            broadcasts_bytes_max=self.broadcasts_bytes_max,
            subscribers_max=self.subscribers_max,
            delivery_frame_bytes_max=min(
                FRAME_BYTES, self.frame_bytes_max - FRAME_HEAD_BYTES, self.out_room_bytes // 8
            ),
            dispatch_bytes_max=min(DISPATCH_BYTES, self.out_room_bytes // 4),
            handed_bytes_max=min(DISPATCH_BYTES, self.out_room_bytes // 8),
            acks_ahead_max=self.acks_ahead_max,
            deaths_max=self.deaths_max,
            death_retry_base_ms=max(1, round(self.death_retry_base_s * 1000)),
            death_retry_cap_ms=max(1, round(self.death_retry_cap_s * 1000)),
            snoozes_max=self.snoozes_max,
            trace_length_max=self.failure_trace_length_max,
            transactions_max=self.transactions_max,
            transactions_bytes_max=self.transactions_bytes_max,
            transaction_tasks_max=self.transaction_tasks_max,
            transaction_bytes_max=self.transaction_bytes_max,
            transaction_check_ms=int(self.transaction_check_s * 1000),
            transaction_check_every_ms=int(self.transaction_check_every_s * 1000),
            transaction_checks_max=self.transaction_checks_max,
            transactions_remembered_max=self.transactions_remembered_max,
            transactions_remembered_ms=int(self.transactions_remembered_s * 1000),
            bulk_max=self.bulk_max,
            bulk_remembered_max=self.bulk_remembered_max,
            bulk_remembered_ms=int(self.bulk_remembered_s * 1000),
            in_flight_max=self.in_flight_max,
            resident_horizon_ms=int(self.resident_horizon_s * 1000),
            resident_bytes_max=self.resident_bytes_max or HOT_BYTES_MAX,
            lease_checkpoint_ms=int(self.lease_checkpoint_s * 1000),
            reconnect_grace_ms=int(self.reconnect_grace_s * 1000),
            endings_max=self.endings_max,
            sessions_max=self.sessions_max,
            session_outcomes_max=self.session_outcomes_max,
            outcomes_per_session_max=self.outcomes_per_session_max,
            topics_max=self.topics_max,
            groups_per_topic_max=self.groups_per_topic_max,
            groups_max=self.groups_max,
            tasks_max=self.tasks_max,
            scheduled_max=self.scheduled_max,
            backlog_max=self.backlog_max,
        )


def _scheme(value: str, field: str, known: tuple[str, ...]) -> None:
    split_address(value, field)
    scheme, mark, _ = value.partition("://")
    if mark and scheme not in known:
        raise ValueError(f"{field} must begin with {' or '.join(f'{k}://' for k in known)}")


EVERY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  # not listened at
"""Hosts of who listens at every address → where this machine finds it."""


def found_here(host: str) -> str:
    """Where this machine finds what listens at a host."""
    return EVERY_ADDRESS.get(host or "0.0.0.0", host)  # noqa: S104  # it is replaced


def _is_local(host: str) -> bool:
    """Whether only this machine reaches it."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def split_address(value: str, field: str) -> tuple[str, int]:
    """``SCHEME://HOST:PORT`` or ``HOST:PORT`` as (host, port)."""
    rest = value.split("://", 1)[-1]
    host, colon, port = rest.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65_535:
        raise ValueError(f"{field} must be HOST:PORT with a port of 0 to 65535, not {value!r}")
    return host.strip("[]"), int(port)


def load(config_path: str | None = None, overrides: dict[str, Any] | None = None) -> Settings:
    """Settings from file, environment and flags (strongest last).

    Raises BadRequest naming each wrong setting, its value and what is allowed.
    """
    if config_path is not None and not Path(config_path).is_file():
        raise BadRequest(f"config {config_path}: no such file")
    environment.check(lambda: Settings.model_fields)

    loaded = Settings
    if config_path is not None:  # another class, which is dear to make

        class Loaded(Settings):
            model_config = SettingsConfigDict(toml_file=config_path)

        loaded = Loaded
    try:
        return loaded(**{k: v for k, v in (overrides or {}).items() if v is not None})
    except ValidationError as error:
        raise BadRequest(_explain(error)) from None
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"config {config_path}: {error}") from None


def _explain(error: ValidationError) -> str:
    parts = []
    for item in error.errors():
        name = ".".join(map(str, item["loc"]))
        # Ours begin so; they say what is wrong in their own words.
        said = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            near = get_close_matches(name, Settings.model_fields, n=1)
            meant = f"; did you mean {near[0]}?" if near else ""
            parts.append(f"there is no setting {name}{meant}")
            continue
        # What concerns several settings names them, and its input is all of them.
        parts.append(f"setting {name}: {said} (got {item['input']!r})" if name else said)
    return "; ".join(parts)
