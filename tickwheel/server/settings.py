"""Settings of the daemon. Flags override environment variables (``TICKWHEEL_*``), which override
the TOML file.

The name of a number ends in its unit, if it has one.
"""

from __future__ import annotations

import json
import os
import socket
from difflib import get_close_matches
from ipaddress import ip_address, ip_network
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Self, get_args
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
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
from tickwheel.model.policies import (
    DELAY_MS_MAX,
    RETRIES_MAX,
    InvalidPolicy,
    RetryPolicy,
    duration_ms,
    named_policies,
)
from tickwheel.model.records import TRACE_LENGTH_MAX
from tickwheel.model.values import INTEGER_MAX, whole_number
from tickwheel.server.shard.callers import TOKEN_TEXT

TASK_EXTRAS_BYTES = 64 * 1024
"""Maximum bytes of a task besides its body, if ``task_bytes_max`` is not set."""
FRAME_BYTES = 1024 * 1024
"""Maximum bytes of a DELIVER frame with several tasks. A single task can be larger."""
DISPATCH_BYTES = 16 * 1024 * 1024
"""Maximum bytes that are dispatched before the event loop runs other work."""
HOT_BYTES_MAX = 256 * 1024 * 1024
"""Default of ``resident_bytes_max``, the bytes of bodies of tasks that are due soon or ready."""
REDIS_RESIDENT_BYTES_MAX = 2 * 1024 * 1024 * 1024
"""Default of ``resident_bytes_max`` with Redis. All bodies stay in memory, so that the daemon can
restore a Redis that lost them."""
DURATION_S_MAX = 100 * 31_557_600
"""Maximum of a duration without a lower limit: 100 years. A moment that is so far away fits into
frames and into every store."""


class Settings(BaseSettings):
    """Settings of ``tickwheel serve``."""

    model_config = SettingsConfigDict(
        env_prefix=environment.PREFIX,
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
    )

    # stores and addresses
    store: str = "sqlite:///tickwheel.db"
    expect_store: bool = False
    """Refuse to start with an empty store, whose data must have been lost. Set this after the first
    start."""
    expect_standbys: int = Field(default=0, ge=0, le=64)
    """Expected standbys of each shard. If there are fewer, the daemon reports this and an alert
    fires."""
    expect_nodes: int = Field(default=0, ge=0, le=1_000)
    """Expected nodes, including this node."""
    listen: str = "tcp://127.0.0.1:7355"
    http: str | None = None
    processes: int | Literal["auto"] = 1
    """Number of shards of a store that is a folder, each with a separate daemon. "auto" is one for
    each processor."""
    http_all: str | None = None
    """Address of the HTTP server for all shards: health, metrics, addresses, API and console."""
    route: str = ""
    """Addresses of all shards, in order. The parent sets it for daemons of ``processes``."""
    moved_id: int = Field(default=0, ge=0)
    """Tasks with ids up to this can be in any shard, regardless of the shard in their ids. The
    parent sets it for daemons of ``processes``."""
    node: str = Field(default_factory=socket.gethostname)
    node_capacity: float = Field(default=1.0, ge=0.01, le=1_000)
    """Weight of this node (``?shards=N``). Its number of shards is proportional to its weight."""
    serve_token: str | None = Field(default=None, repr=False)
    """Token with all rights. It is not called ``token``, because clients read
    ``TICKWHEEL_TOKEN``."""
    tokens_file: str | None = None
    """File of tokens with individual rights. If it is None, only ``serve_token`` is valid."""
    audit_file: str | None = None
    """File that records the actions of operators."""
    audit_bytes_max: int = Field(default=64 * 1024 * 1024, ge=64 * 1024)
    """Maximum bytes of ``audit_file``, and of its predecessor."""
    quota_tasks_per_s: float | None = Field(default=None, gt=0)
    """Each of the ``quota`` settings applies to tokens that do not set their own quota."""
    quota_bytes_per_s: float | None = Field(default=None, gt=0)
    quota_pending: int | None = Field(default=None, gt=0)
    quota_connections: int | None = Field(default=None, gt=0)
    quota_subscriptions: int | None = Field(default=None, gt=0)
    quota_transactions: int | None = Field(default=None, gt=0)
    login_delay_s: float = Field(default=0.25, ge=0, le=10)
    """Seconds before the answer to a wrong token."""
    tls_cert: str | None = None
    """PEM file with the chain, beginning with the daemon's certificate."""
    tls_key: str | None = None
    """File of the key; None if it is in the file ``tls_cert``."""
    tls_client_ca: str | None = None
    """File of the CA that signs clients' certificates. If it is None, none are requested."""
    tls_client_required: bool = False
    tls_handshake_timeout_s: float = Field(default=5.0, gt=0, le=600)
    tls_handshakes_max: int = Field(default=256, gt=0)
    """Maximum handshakes in progress on each port."""
    tls_handshakes_per_s: float = Field(default=500.0, gt=0)
    """Maximum handshakes begun per second on each port."""
    http_hosts: str = ""
    """Host names, separated by commas, that requests to a port without tokens can use."""
    insecure: bool = False
    """Allow other machines to connect without tokens or without TLS."""
    push_allow: str = ""
    """Private networks, separated by commas, in which targets are allowed."""
    inbox: str | None = Field(default=None, repr=False)
    """Database from which tasks are taken that applications write in their transactions:
    postgresql://USER@HOST/DATABASE?schema=NAME or sqlite:///PATH."""
    backup_dir: str | None = None
    ready_file: str | None = None
    file_mode: Literal["0600", "0640", "0644"] = "0640"
    """Most permissive mode of the daemon's files. Its folders also have execute permission."""
    # failover
    advertise: str | None = None
    http_advertise: str | None = None
    leader_ttl_s: float = Field(default=3.0, ge=0.2, le=3_600)
    store_wait_s: float | None = Field(default=None, ge=0, le=3_600)
    """Maximum seconds to wait at a start for a server that does not answer; None is unlimited."""
    allow_volatile_store: bool = False
    # disk space
    disk_refuse: float = Field(default=0.90, gt=0, le=1)
    """Used fraction of SQLite's disk above which new tasks are refused."""
    # logs and metrics
    log_format: Literal["console", "json"] = "console"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    metrics_topics_max: int = Field(default=1_000, ge=0)
    """Maximum topics, and maximum pairs of topic and group, with separate time series."""
    metrics_lateness_topics_max: int = Field(default=100, ge=0)
    otlp_endpoint: str | None = None
    """URL, without ``/v1/…``, that receives spans and metrics by OTLP over HTTP, or None."""
    otlp_headers_file: str | None = None
    """File with headers for the endpoint, one ``Name: value`` per line."""
    otlp_interval_s: float = Field(default=60.0, ge=1, le=86_400)
    """Seconds between exports of metrics."""
    trace_sample: float = Field(default=0.01, ge=0, le=1)
    """The daemon adds spans to this fraction of the traces that producers have sampled."""
    # the wheel
    slots: int = Field(default=3600, ge=2, le=1_000_000)
    tick_ms: int = Field(default=1000, ge=1, le=3_600_000)
    shard: int = Field(default=0, ge=0, le=1023)
    delay_max_s: float = Field(default=10 * 365.25 * 86_400, gt=0, le=DURATION_S_MAX)
    within_max_s: float = Field(default=86_400, gt=0, le=DURATION_S_MAX)
    delay_levels: str = DELAY_LEVELS
    """Delays of levels 1, 2, …, separated by spaces; units s, m, h, d."""
    clock_hold_over_s: float = Field(default=86_400.0, gt=0, le=DURATION_S_MAX)
    clock_hold_start_over_s: float = Field(default=7 * 86_400.0, ge=7_200, le=DURATION_S_MAX)
    """The minimum is two hours, because an idle daemon stores the time only once an hour."""
    accept_clock: bool = False
    resident_horizon_s: float = Field(default=60.0, ge=0, le=DURATION_S_MAX)
    resident_bytes_max: int | None = Field(default=None, gt=0)
    # delivery
    lease_default_s: float = Field(default=30.0, gt=0, le=DURATION_S_MAX)
    lease_max_s: float = Field(default=43_200.0, gt=0, le=DURATION_S_MAX)
    lease_checkpoint_s: float = Field(default=0.1, ge=0, le=DURATION_S_MAX)
    reconnect_grace_s: float = Field(default=5.0, ge=0, le=DURATION_S_MAX)
    deaths_max: int = Field(default=3, ge=1, le=1_000)
    death_retry_base_s: float = Field(default=1.0, ge=0.001, le=86_400)
    death_retry_cap_s: float = Field(default=60.0, ge=0.001, le=86_400)
    retry_base_s: float = Field(default=10.0, ge=0, le=DELAY_MS_MAX // 1000)
    retry_factor: float = Field(default=2.0, ge=1, le=1_000_000)
    retry_cap_s: float = Field(default=7_200.0, ge=0, le=DELAY_MS_MAX // 1000)
    retry_max: int = Field(default=16, ge=0, le=RETRIES_MAX)
    retry_jitter: float = Field(default=0.1, ge=0, le=1)
    retry_policies: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Retry policies by name, in wire form: {"kind": "fixed", "delay_ms": 5000, …}."""
    failure_trace_length_max: int = Field(default=TRACE_LENGTH_MAX, ge=0, le=32_768)
    dead_retention_s: float = Field(default=14 * 86_400.0, gt=0, le=DURATION_S_MAX)
    group_unused_report_s: float = Field(default=7 * 86_400.0, gt=0, le=DURATION_S_MAX)
    group_unused_end_s: float | None = Field(default=None, gt=0, le=DURATION_S_MAX)
    """If it is None, unused groups are never ended."""
    broadcast_tasks_max: int = Field(default=10_000, gt=0)
    broadcast_bytes_max: int = Field(default=32 * 1024 * 1024, gt=0)
    broadcasts_bytes_max: int = Field(default=256 * 1024 * 1024, gt=0)
    prefetch_max: int = Field(default=65_535, gt=0)
    pull_max: int = Field(default=1_024, gt=0)
    # history and backups
    history_dir: str | None = None
    report_dir: str | None = None
    """Folder of ``tickwheel report --out DIR``, whose page the console shows."""
    history_bodies: bool = False
    history_segment_bytes: int = Field(default=SEGMENT_BYTES, ge=4_096)
    history_spool_bytes_max: int = Field(default=BYTES_MAX, ge=65_536)
    history_retention_s: float = Field(default=RETENTION_S, gt=0, le=DURATION_S_MAX)
    history_bytes_max: int | None = Field(default=None, gt=0)
    history_disk_warn: float = Field(default=DISK_WARN, gt=0, le=1)
    history_disk_clean: float = Field(default=DISK_CLEAN, gt=0, le=1)
    """Used fractions of the history's disk above which the daemon warns and deletes; 1 is off."""
    history_clean_hour: int = Field(default=CLEAN_HOUR, ge=0, le=23)
    backup_daily_hour: int | None = Field(default=None, ge=0, le=23)
    """Hour of local time. If it is None, there are no daily backups."""
    backup_keep: int = Field(default=7, ge=1)
    # limits
    frame_bytes_max: int = Field(default=4 * 1024 * 1024, ge=1024)
    body_bytes_max: int = Field(default=1024 * 1024, gt=0)
    task_bytes_max: int | None = Field(default=None, gt=0)
    """If it is None, the limit is ``body_bytes_max`` plus 64 KiB."""
    property_value_bytes_max: int = Field(default=4_096, gt=0)
    tasks_per_frame_max: int = Field(default=16_384, gt=0)
    connections_max: int = Field(default=4_096, gt=0)
    http_connections_max: int = Field(default=1_024, gt=0)
    http_body_bytes_max: int | None = Field(default=None, gt=0)
    """Maximum bytes of an HTTP request's body, or a line of it; by default twice the largest
    task."""
    http_bodies_bytes_max: int = Field(default=64 * 1024 * 1024, gt=0)
    """Maximum bytes of all HTTP request bodies in memory."""
    http_body_timeout_s: float = Field(default=30.0, gt=0, le=DURATION_S_MAX)
    http_wait_max_s: float = Field(default=60.0, ge=0, le=DURATION_S_MAX)
    """Maximum seconds that a pull over HTTP waits; proxies drop requests that wait longer."""
    http_idle_timeout_s: float = Field(default=5.0, gt=0, le=DURATION_S_MAX)
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
    """Maximum settlements per subscription that return credit before they are durable."""
    ack_gather_ms: int = Field(default=10, ge=0, le=1_000)
    """Maximum milliseconds that an ack whose answer is not awaited waits for more acks; 0 is
    off."""
    schedules_max: int = Field(default=10_000, ge=0)
    schedule_bytes_max: int = Field(default=64 * 1024, gt=0)
    """Maximum bytes of a schedule's body and options."""
    schedule_interval_min_s: float = Field(default=1.0, ge=0.1, le=DURATION_S_MAX)
    transactions_max: int = Field(default=10_000, ge=0)
    """Maximum undecided transactions."""
    transactions_bytes_max: int = Field(default=64 * 1024 * 1024, gt=0)
    """Maximum bytes of half tasks in all transactions."""
    transaction_tasks_max: int = Field(default=10_000, gt=0)
    transaction_bytes_max: int = Field(default=4 * 1024 * 1024, gt=0)
    transaction_check_s: float = Field(default=60.0, gt=0, le=DURATION_S_MAX)
    """Seconds without a request about a transaction until its producer group is asked for the
    outcome."""
    transaction_check_every_s: float = Field(default=60.0, gt=0, le=DURATION_S_MAX)
    """Seconds between repeated check-backs to the producer group."""
    transaction_checks_max: int = Field(default=15, ge=1)
    """Maximum check-backs before the transaction is parked."""
    transactions_remembered_max: int = Field(default=100_000, ge=0)
    """Maximum decided transactions that are remembered for a repeated commit or rollback."""
    transactions_remembered_s: float = Field(default=3_600.0, gt=0, le=DURATION_S_MAX)
    """Seconds for which a decided transaction is remembered."""
    bulk_max: int = Field(default=100, ge=0)
    """Maximum running bulk operations."""
    bulk_remembered_max: int = Field(default=1_000, ge=0)
    """Maximum finished bulk operations whose result is remembered."""
    bulk_remembered_s: float = Field(default=604_800.0, gt=0, le=DURATION_S_MAX)
    """Seconds for which a finished bulk operation is remembered."""
    resets_max: int = Field(default=10, ge=0)
    """Maximum groups that are being reset, and maximum unanswered dry runs."""
    reset_plan_bytes_max: int = Field(default=4 * 1024**3, gt=0)
    """Maximum bytes on disk of a reset's tasks with their bodies."""
    snoozes_max: int = Field(default=1_000, ge=0)
    """Maximum snoozes of a task by each group."""
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
    slow_reader_timeout_s: float = Field(default=30.0, gt=0, le=DURATION_S_MAX)
    endings_max: int = Field(default=100_000, gt=1)
    heartbeat_interval_s: float = Field(default=10.0, ge=0.1, le=86_400)
    heartbeat_timeout_s: float = Field(default=30.0, ge=0.2, le=86_400)
    hello_timeout_s: float = Field(default=10.0, gt=0, le=DURATION_S_MAX)
    outcome_timeout_s: float = Field(default=2.5, gt=0, le=DURATION_S_MAX)
    drain_timeout_s: float = Field(default=10.0, gt=0, le=DURATION_S_MAX)

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true and false for a number, which would be taken as 1 and 0."""
        kind = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and bool not in (kind, *get_args(kind)):
            raise ValueError("must not be true or false")
        return value

    @field_validator("processes", mode="before")
    @classmethod
    def _processes(cls, value: Any) -> Any:
        count = whole_number(value) if type(value) is str else value
        if value != "auto" and not (type(count) is int and 1 <= count <= SHARDS_MAX):
            raise ValueError(f"must be auto or a whole number between 1 and {SHARDS_MAX}")
        return value if value == "auto" else count

    @field_validator("listen")
    @classmethod
    def _listen(cls, value: str) -> str:
        _scheme(value, "listen", ("tcp", "tls"))
        return value

    @field_validator("push_allow", mode="before")
    @classmethod
    def _push_allow_many(cls, value: Any) -> Any:
        """Join the list of a repeated option."""
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
    def _ordinary(self) -> Self:
        """Refuse blank texts: a caller without a token would have an empty ``serve_token``, and an
        empty path is the working directory. Refuse integers that a frame cannot contain."""
        for name in self.model_fields_set:
            value = getattr(self, name)
            if type(value) is int and value > INTEGER_MAX:
                got = f"(got {shown(value)})"
                raise ValueError(f"setting {name} must not be above {INTEGER_MAX} {got}")
            if type(value) is str and not value.strip():
                if Settings.model_fields[name].default != "":
                    raise ValueError(f"setting {name} must not be blank (got {value!r}); omit it")
        return self

    @model_validator(mode="after")
    def _retry_policies(self) -> Self:
        """Check the policies as ``engine`` reads them, with the default of these settings."""
        try:
            named_policies(self.retry_policies, self.default_policy)
        except InvalidPolicy as error:
            raise ValueError(error.message(shown)) from None
        return self

    @model_validator(mode="after")
    def _tls(self) -> Self:
        """Refuse a certificate that no port uses, and a TLS port without a certificate."""
        ports = [name for name in ("listen", "http", "http_all") if self.speaks_tls(name)]
        if ports and self.tls_cert is None:
            raise ValueError(f"{ports[0]} ({getattr(self, ports[0])}) needs tls_cert")
        for name in ("tls_key", "tls_client_ca", "tls_client_required"):
            if getattr(self, name) and self.tls_cert is None:
                raise ValueError(f"{name} needs tls_cert")
        if self.tls_cert is not None and not ports:
            raise ValueError(
                "tls_cert is set, but no port uses TLS: write tls:// in listen, or https:// in http"
            )
        if self.tls_client_required and self.tls_client_ca is None:
            raise ValueError("tls_client_required needs tls_client_ca")
        return self

    @model_validator(mode="after")
    def _exposed(self) -> Self:
        """Require tokens, and TLS to keep them secret, on ports that other machines can reach."""
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
                    f"{name} ({address}) is open to other machines without"
                    f" {' and without '.join(missing)}; see docs/security.md, or set insecure"
                    " (--insecure)"
                )
        return self

    @model_validator(mode="after")
    def _http_of_all(self) -> Self:
        """Require ``http`` for ``http_all``, which forwards requests to the shards' HTTP ports."""
        if self.http_all is None:
            return self
        if self.processes == 1:
            raise ValueError(
                f"http_all ({self.http_all}) needs several shards, but processes is 1; use http"
                " for a single daemon"
            )
        if self.http is None:
            raise ValueError(
                f"http_all ({self.http_all}) needs http, the HTTP address of each shard"
            )
        return self

    @model_validator(mode="after")
    def _inbox(self) -> Self:
        """Refuse an inbox for several shards, because its process connects to this daemon alone."""
        if self.inbox is not None and (self.processes != 1 or "shards=" in self.store):
            raise ValueError(
                "inbox is for a daemon with a single shard; for several shards, run"
                " `tickwheel inbox run` beside them"
            )
        return self

    @model_validator(mode="after")
    def _serve_token(self) -> Self:
        """Refuse a ``serve_token`` that could be a token of ``tokens_file``, even a revoked one."""
        if self.tokens_file is None or self.serve_token is None:
            return self
        if TOKEN_TEXT.match(self.serve_token):
            raise ValueError(
                "serve_token must not have the form of a token of tokens_file (tw_ID_SECRET): the"
                " holder of that token would have all rights, even after it is revoked"
            )
        return self

    @property
    def http_names(self) -> frozenset[str] | None:
        """Host names that requests to an HTTP port without tokens can use. None is any name,
        because other machines reach the port and ``http_hosts`` is empty."""
        names = {name.strip().rstrip(".").lower() for name in self.http_hosts.split(",")} - {""}
        host = split_address(self.http, "http")[0] if self.http is not None else ""
        if not names and not _is_local(host):
            return None
        return frozenset(names | {host.lower()})

    @property
    def shard_urls(self) -> tuple[str, ...]:
        """The addresses in ``route``; empty if this daemon has the only shard."""
        return tuple(filter(None, self.route.split(",")))

    @property
    def push_networks(self) -> tuple[str, ...]:
        """The networks in ``push_allow``."""
        return tuple(text.strip() for text in self.push_allow.split(",") if text.strip())

    def speaks_tls(self, port: str) -> bool:
        """Return whether ``port`` (``listen``, ``http`` or ``http_all``) uses TLS."""
        address = getattr(self, port)
        return address is not None and address.startswith(("tls://", "https://"))

    @property
    def http_url(self) -> str | None:
        """``http`` as a URL."""
        return self.http if self.http is None or "://" in self.http else f"http://{self.http}"

    def http_for_others(self, bound: str) -> str:
        """Return the URL at which other machines reach the HTTP server that listens at ``bound``.
        If it listens at every address of its machine, the URL has the host of ``advertise``."""
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
                f"delay_levels has a level of {highest_ms} ms; the limit is delay_max_s"
                f" ({self.delay_max_s:g} s)"
            )
        return self

    @model_validator(mode="after")
    def _disk_shares(self) -> Self:
        """Require that the daemon warns before it deletes, and deletes before it refuses tasks."""
        names = ("history_disk_warn", "history_disk_clean", "disk_refuse")
        shares = [(name, getattr(self, name)) for name in names]
        enabled = [(name, share) for name, share in shares if share < 1]
        if self.history_dir is not None:
            for (low, lower), (high, higher) in pairwise(enabled):
                if lower > higher:
                    raise ValueError(
                        f"{low} ({lower:g}) must not be above {high} ({higher:g}); 1 is off"
                    )
        return self

    @model_validator(mode="after")
    def _frames_fit(self) -> Self:
        """Require an output buffer that can hold the largest task of a slow consumer."""
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
                f" ({report_s:g}): a group must be reported before it is deleted"
            )
        return self

    @model_validator(mode="after")
    def _heartbeats(self) -> Self:
        interval_s, timeout_s = self.heartbeat_interval_s, self.heartbeat_timeout_s
        if timeout_s < 2 * interval_s:
            raise ValueError(
                f"heartbeat_timeout_s ({timeout_s:g}) must be at least twice"
                f" heartbeat_interval_s ({interval_s:g}): one heartbeat can be late"
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
        # Looking up each setting takes most of the time, so skip it if no variable is set.
        if any(name.upper().startswith(environment.PREFIX) for name in os.environ):
            sources.append(_Environment(settings_cls))
        if settings_cls.model_config.get("toml_file") is not None:
            sources.append(TomlConfigSettingsSource(settings_cls))
        return tuple(sources)

    @property
    def delay_levels_ms(self) -> tuple[int, ...]:
        """The delays in ``delay_levels``, level 1 first."""
        return parse_delay_levels(self.delay_levels)

    @property
    def out_bytes_stop(self) -> int:
        """Buffered bytes at which deliveries stop: ``out_bytes_soft``, but at most half of
        ``out_bytes_max``, because frames in progress are still written."""
        return min(self.out_bytes_soft, self.out_bytes_max // 2)

    @property
    def out_room_bytes(self) -> int:
        """Bytes between ``out_bytes_stop`` and ``out_bytes_max``. A quarter each is reserved for a
        dispatch, its last frame, at-most-once deliveries, and answers."""
        return self.out_bytes_max - self.out_bytes_stop

    @property
    def largest_task_bytes(self) -> int:
        """Maximum bytes of a task: ``task_bytes_max``, or less if its DELIVER frame would exceed
        ``frame_bytes_max``."""
        bytes_max = self.task_bytes_max or self.body_bytes_max + TASK_EXTRAS_BYTES
        return min(bytes_max, self.frame_bytes_max - DELIVERY_BYTES - FRAME_HEAD_BYTES)

    @property
    def http_body_bytes(self) -> int:
        """``http_body_bytes_max``, by default enough for the largest task as base64 in JSON."""
        return self.http_body_bytes_max or 2 * self.largest_task_bytes

    def limits(self) -> Limits:
        """Return the limits that the answer to HELLO announces."""
        return Limits(
            frame_bytes_max=self.frame_bytes_max,
            body_bytes_max=min(self.body_bytes_max, self.largest_task_bytes),
            task_bytes_max=self.largest_task_bytes,
            property_value_bytes_max=self.property_value_bytes_max,
            tasks_per_frame_max=self.tasks_per_frame_max,
            ids_per_frame_max=self.tasks_per_frame_max,
            delay_ms_max=duration_ms(self.delay_max_s),
            within_ms_max=duration_ms(self.within_max_s),
            window_max=self.window_max,
            pull_max=self.pull_max,
            prefetch_max=self.prefetch_max,
            lease_ms_max=duration_ms(self.lease_max_s),
            subscriptions_max=self.subscriptions_max,
            pulls_max=self.pulls_max,
            connections_max=self.connections_max,
        )

    def history(self, shard: int) -> HistoryOptions | None:
        """Return the options of a shard's history, or None if the history is off."""
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

    @property
    def default_policy(self) -> RetryPolicy:
        """The retry policy of the settings ``retry_…``."""
        return RetryPolicy(
            base_ms=duration_ms(self.retry_base_s),
            factor=self.retry_factor,
            cap_ms=duration_ms(self.retry_cap_s),
            retries_max=self.retry_max,
            jitter=self.retry_jitter,
        )

    def engine(self) -> EngineConfig:
        """Return the engine's configuration, converted to its units."""
        return EngineConfig(
            slots=self.slots,
            tick_ms=self.tick_ms,
            shard=self.shard,
            shards=len(self.shard_urls) or 1,
            moved_id=self.moved_id,
            retry=self.default_policy,
            policies=named_policies(self.retry_policies, self.default_policy),
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
            death_retry_base_ms=duration_ms(self.death_retry_base_s),
            death_retry_cap_ms=duration_ms(self.death_retry_cap_s),
            snoozes_max=self.snoozes_max,
            trace_length_max=self.failure_trace_length_max,
            transactions_max=self.transactions_max,
            transactions_bytes_max=self.transactions_bytes_max,
            transaction_tasks_max=self.transaction_tasks_max,
            transaction_bytes_max=self.transaction_bytes_max,
            transaction_check_ms=duration_ms(self.transaction_check_s),
            transaction_check_every_ms=duration_ms(self.transaction_check_every_s),
            transaction_checks_max=self.transaction_checks_max,
            transactions_remembered_max=self.transactions_remembered_max,
            transactions_remembered_ms=duration_ms(self.transactions_remembered_s),
            bulk_max=self.bulk_max,
            bulk_remembered_max=self.bulk_remembered_max,
            bulk_remembered_ms=duration_ms(self.bulk_remembered_s),
            in_flight_max=self.in_flight_max,
            resident_horizon_ms=duration_ms(self.resident_horizon_s),
            resident_bytes_max=self.resident_bytes_max or HOT_BYTES_MAX,
            lease_checkpoint_ms=duration_ms(self.lease_checkpoint_s),
            reconnect_grace_ms=duration_ms(self.reconnect_grace_s),
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


class _Environment(EnvSettingsSource):
    """The settings in the environment, where a table is JSON."""

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        return _table(field_name, value)


def _table(name: str, value: Any) -> Any:
    """Return the table in the JSON of the environment or of ``--set``. Raise BadRequest."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"setting {name} must be JSON: {error} (got {shown(value)})") from None


def _scheme(value: str, field: str, known: tuple[str, ...]) -> None:
    split_address(value, field)
    scheme, mark, _ = value.partition("://")
    if mark and scheme not in known:
        raise ValueError(f"{field} must begin with {' or '.join(f'{k}://' for k in known)}")


EVERY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  # only compared
"""Loopback address for each host that means every address of the machine."""


def local_host(host: str) -> str:
    """Return the address at which this machine reaches a server that listens at ``host``."""
    return EVERY_ADDRESS.get(host or "0.0.0.0", host)  # noqa: S104  # only compared


def _is_local(host: str) -> bool:
    """Return whether only this machine reaches ``host``."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def split_address(value: str, field: str) -> tuple[str, int]:
    """Return the host and port of ``SCHEME://HOST:PORT`` or ``HOST:PORT``. Raise ValueError for any
    other text."""
    rest = value.split("://", 1)[-1]
    host, colon, port = rest.rpartition(":")
    number = whole_number(port)
    if not colon or not host or number is None or number > 65_535:
        raise ValueError(
            f"{field} must be HOST:PORT with a port between 0 and 65535, not {value!r}"
        )
    return host.strip("[]"), number


def load(config_path: str | None = None, overrides: dict[str, Any] | None = None) -> Settings:
    """Return the settings of the file, overridden by the environment, overridden by flags.

    Raise BadRequest, which names each invalid setting, its value and the allowed values.
    """
    if config_path is not None and not Path(config_path).is_file():
        raise BadRequest(f"config {config_path}: the file does not exist")
    environment.check(lambda: Settings.model_fields)

    values = {k: v for k, v in (overrides or {}).items() if v is not None}
    if "retry_policies" in values:
        values["retry_policies"] = _table("retry_policies", values["retry_policies"])
    loaded = Settings
    if config_path is not None:  # needs a subclass, which is expensive to create

        class Loaded(Settings):
            model_config = SettingsConfigDict(toml_file=config_path)

        loaded = Loaded
    try:
        return loaded(**values)
    except ValidationError as error:
        raise BadRequest(_explain(error)) from None
    except (OSError, ValueError, RecursionError) as error:  # of tomllib too
        raise BadRequest(f"config {config_path}: {error}") from None


def _explain(error: ValidationError) -> str:
    parts = []
    for item in error.errors():
        name = ".".join(map(str, item["loc"]))
        # Messages of our validators have this prefix.
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            near = get_close_matches(name, Settings.model_fields, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            parts.append(f"there is no setting {name}{hint}")
            continue
        field = Settings.model_fields.get(name)
        got = f" (got {item['input']!r})" if field is None or field.repr else ""
        # A message about several settings names them, and its input is all settings.
        parts.append(f"setting {name}: {message}{got}" if name else message)
    return "; ".join(parts)
