"""How late tasks are in another system: from due to the confirmation of a Redis stream, through a
forwarder in a process of its own."""

from __future__ import annotations

from benchmarks.context import Context, Result, measured
from benchmarks.redis_server import Redis, find_redis


def forward(context: Context) -> Result:
    """Each rate on a daemon and a Redis of its own. The tasks are there before, due evenly."""
    result = Result("forward")
    redis = find_redis()
    if redis is None:
        result.missing.append("redis-server: not installed")
        return result
    early = repeated = 0
    for rate in context.scale.forward_rates:
        with context.tickwheel() as daemon, Redis(context.fresh_folder("target"), redis[0]) as to:
            cpu_s = to.cpu_s()
            figures = measured(
                daemon, "client_forward", target=f"{to.url}?stream=due", rate=rate,
                count=int(rate * context.scale.forward_s),
            )  # fmt: skip
            redis_us = (to.cpu_s() - cpu_s) / figures["count"] * 1e6
        early += figures["early"]
        repeated += figures["repeated"]
        late = figures["late_ms"]
        for name, value in late.items():
            result.metric(f"late_{name}_ms_at_{rate}", value)
        daemon_us = figures["server_cpu_s"] / figures["count"] * 1e6
        forwarder_us = figures["client_cpu_s"] / figures["count"] * 1e6
        result.metric(f"forwarder_us_at_{rate}", forwarder_us)
        result.details[str(rate)] = figures
        result.row(
            f"{rate:,} a second",
            f"late p50 {late['p50']:.1f} ms, p99 {late['p99']:.1f} ms; processor time a task:"
            f" daemon {daemon_us:.0f} us, forwarder {forwarder_us:.0f} us, Redis {redis_us:.0f} us;"
            f" {figures['batch']:.0f} in a batch",
        )
        context.say(f"forward: {rate}/s: {figures}")
    result.metric("early", early)
    result.metric("repeated", repeated)
    return result
