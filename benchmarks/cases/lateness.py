"""How late deliveries are while enqueues go on at the same rate. There is no peer: beanstalkd's
delays are whole seconds."""

from __future__ import annotations

from typing import Any

from benchmarks.context import Context, Result
from benchmarks.load import Load
from benchmarks.scale import CONNECTIONS, WINDOW
from benchmarks.servers import Tickwheel

DELAY_MS = (1_000, 3_000)
"""Range of the delays in ms, spread evenly: from 3 s on both rates are equal."""
WARM_UP_S = 3.0
_SEED = 7


def lateness(context: Context) -> Result:
    """Each rate on a daemon of its own; its stamp and the client's receive time."""
    result = Result("lateness")
    early = repeated = 0
    for rate in context.scale.lateness_rates:
        with context.tickwheel() as daemon:
            sample = lateness_at(context, daemon, rate)
        early += sample["early"]
        repeated += sample["repeated"]
        result.details[str(rate)] = sample
        for side, what in (("daemon", "daemon's stamp"), ("client", "client's receipt")):
            late = sample[f"{side}_late_ms"]
            for name, value in late.items():
                result.metric(f"{side}_{name}_ms_at_{rate}", value)
            figures = ", ".join(f"{name} {value:.1f} ms" for name, value in late.items())
            result.row(f"{rate:,} a second, {what}", figures)
        context.say(f"lateness: {rate}/s: {sample}")
    result.metric("early", early)
    result.metric("repeated", repeated)
    result.row("early", str(early))
    return result


def lateness_at(
    context: Context,
    daemon: Tickwheel,
    rate: int,
    delay_ms: tuple[int, int] = DELAY_MS,
    connections: int = CONNECTIONS,
    *,
    worker: bool = False,
) -> dict[str, Any]:
    """Measure deliveries at one rate to a number of connections or to a worker, in addition to the
    daemon's existing tasks."""
    seconds = context.scale.lateness_s
    warm_up_s = min(WARM_UP_S, seconds / 2)
    job = "client_consume" if worker else "consume"
    more = {} if worker else {"prefetch": WINDOW, "connections": connections}
    with (
        Load(
            job, port=daemon.port, count=int(rate * seconds), warm_up_s=warm_up_s, **more
        ) as consumer,
        Load(
            "pace",
            port=daemon.port,
            rate=rate,
            seconds=seconds,
            window=WINDOW,
            delay_ms=delay_ms,
            seed=_SEED,
        ) as producer,
    ):
        cpu_s, switches = daemon.cpu_s(), daemon.switches()
        consumer.start()
        producer.start()
        paced = producer.result()
        figures = consumer.result()
        server_cpu_s, switches = daemon.cpu_s() - cpu_s, daemon.switches() - switches
    return {
        **figures,
        "early": figures["early"] + daemon.stats()["early"],
        "producer_behind_ms": paced["behind_ms"],
        "server_cpu_s": server_cpu_s,
        "switches": switches,
    }
