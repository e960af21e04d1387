"""Writes ``grafana/dashboards/*.json``: ``python -m grafana.generate``, from the repository.

The dashboards are made from the tables in ``boards``, so that they stay alike and a change can
be read; a test fails when the files are not what this program writes. Others, made by hand in
Grafana, may lie beside them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from grafana.boards.events import ANNOTATIONS, HELP
from grafana.boards.late import WHY
from grafana.boards.overview import OVERVIEW
from grafana.boards.parts import Dashboard, Panel, most
from grafana.boards.store import STORE
from grafana.boards.topic import TOPICS

FOLDER = Path(__file__).parent / "dashboards"
DASHBOARDS = (OVERVIEW, TOPICS, STORE, WHY)
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH = 24
PALETTE = {"mode": "palette-classic"}
CONSOLE = "http://127.0.0.1:7356"
"""Where the daemon's HTTP is unless somebody writes something else above the dashboard."""


def _console(page: str) -> str:
    return f"${{console:raw}}/console/#/{page}"


def as_json(dashboard: Dashboard) -> dict[str, Any]:
    """As Grafana 10 and later read it."""
    panels: list[dict[str, Any]] = []
    top = 0
    for row in dashboard.rows:
        width = WIDTH // len(row.panels)
        for index, panel in enumerate(row.panels):
            place = {"x": index * width, "y": top, "w": width, "h": row.height}
            panels.append({"id": len(panels) + 1, "gridPos": place, **_panel(panel)})
        top += row.height
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.about,
        "tags": ["tickwheel"],
        "schemaVersion": 38,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "links": [
            {
                "type": "dashboards",
                "title": "Tickwheel",
                "tags": ["tickwheel"],
                "asDropdown": True,
                "includeVars": True,
                "keepTime": True,
            },
            {
                "type": "link",
                "title": "Console",
                "url": _console(""),
                "tooltip": "Tasks, groups and dead letters in the daemon's console",
                "targetBlank": True,
            },
        ],
        "templating": {"list": _variables(dashboard)},
        "annotations": {"list": [_annotation(*event) for event in ANNOTATIONS]},
        "panels": panels,
    }


def _annotation(name: str, expression: str, text: str, colour: str) -> dict[str, Any]:
    return {
        "name": name,
        "datasource": SOURCE,
        "enable": True,
        "expr": expression,
        "iconColor": colour,
        "step": "60s",
        "titleFormat": name,
        "textFormat": text,
    }


def _variables(dashboard: Dashboard) -> list[dict[str, Any]]:
    source = {"name": "datasource", "type": "datasource", "query": "prometheus"}
    found: list[dict[str, Any]] = [source | {"label": "Data source"}]
    found.append(_variable("job", "label_values(tickwheel_build_info, job)", several=False))
    found += [_variable(name, query, several=True) for name, query in dashboard.variables]
    address = {"name": "console", "type": "textbox", "label": "Daemon's HTTP address"}
    current = {"text": CONSOLE, "value": CONSOLE}
    found.append(address | {"query": CONSOLE, "current": current, "options": [current]})
    return found


def _variable(name: str, query: str, *, several: bool) -> dict[str, Any]:
    variable: dict[str, Any] = {
        "name": name,
        "label": name.capitalize(),
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
        "multi": several,
        "includeAll": several,
    }
    if several:
        variable |= {"allValue": ".*", "current": {"text": "All", "value": "$__all"}}
    return variable


def _panel(panel: Panel) -> dict[str, Any]:
    if panel.kind == "text":
        options = {"mode": "markdown", "content": panel.about}
        return {"type": "text", "title": panel.title, "options": options}
    at_once = panel.kind in ("stat", "table")
    targets = [
        {
            "refId": chr(ord("A") + number),
            "datasource": SOURCE,
            "expr": _bounded(panel, expression, legend),
            "legendFormat": legend.replace("{{instance}}", "{{instance}} {{shard}}") or "__auto",
            "instant": at_once,
            "range": not at_once,
            "format": {"heatmap": "heatmap", "table": "table"}.get(panel.kind, "time_series"),
        }
        for number, (expression, legend) in enumerate(panel.queries)
    ]
    made: dict[str, Any] = {
        "type": panel.kind,
        "title": panel.title,
        "datasource": SOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "options": _options(panel),
    }
    made["description"] = _description(panel)
    if panel.kind == "table":
        hidden = {"excludeByName": {"Time": True, "__name__": True, "job": True}}
        made["transformations"] = [{"id": "organize", "options": hidden}]
    return made


def _bounded(panel: Panel, expression: str, legend: str) -> str:
    """A line for each topic or group may be a thousand lines: only the highest."""
    if "{{topic}}" not in legend or panel.kind == "table":
        return expression
    return most(expression)


def _description(panel: Panel) -> str:
    """What stands in the table of the dashboard, and what each of its metrics means."""
    named = " ".join(expression for expression, _ in panel.queries)
    names = dict.fromkeys(re.findall(r"(?:\w+:)?(?:tickwheel|process)_\w+(?::\w+)?", named))
    plain = dict.fromkeys(re.sub(r"_(bucket|sum|count)$", "", name) for name in names)
    meanings = [f"`{name}`: {HELP[name]}" for name in plain]
    return "\n\n".join(filter(None, [panel.about, *meanings]))


def _mappings(panel: Panel) -> list[dict[str, Any]]:
    options = {
        str(value): {"text": word, "color": colour, "index": index}
        for index, (value, word, colour) in enumerate(panel.states)
    }
    return [{"type": "value", "options": options}]


def _links(panel: Panel) -> list[dict[str, Any]]:
    """From a line of a topic to its dashboard and its page in the console; from a number of tasks
    to these tasks."""
    if panel.console:
        return [{"title": "Show them", "url": _console(panel.console), "targetBlank": True}]
    if not any("{{topic}}" in legend for _, legend in panel.queries):
        return []
    url = (
        "/d/tickwheel-topic?var-job=${job}&var-topic=${__field.labels.topic}"
        "&var-group=${__field.labels.group:percentencode}&${__url_time_range}"
    )
    page = "groups?topic=${__field.labels.topic:percentencode}"
    console = {"title": "This topic in the console", "url": _console(page), "targetBlank": True}
    return [{"title": "This topic", "url": url}, console]


def _defaults(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "color": PALETTE}
    if panel.states:
        defaults["mappings"] = _mappings(panel)
    if links := _links(panel):
        defaults["links"] = links
    steps = _steps(panel)
    if steps:
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    if panel.kind == "state-timeline":
        defaults["custom"] = {"fillOpacity": 70, "lineWidth": 0}
    if panel.kind == "stat":
        defaults["color"] = {"mode": "thresholds"}
        defaults.setdefault(
            "thresholds", {"mode": "absolute", "steps": [{"color": "blue", "value": None}]}
        )
    if panel.kind == "timeseries":
        custom: dict[str, Any] = {"lineWidth": 1, "fillOpacity": 10, "showPoints": "never"}
        if panel.stacked:
            custom["stacking"] = {"mode": "normal", "group": "A"}
        if steps:
            custom["thresholdsStyle"] = {"mode": "line"}
        defaults |= {"custom": custom, "min": 0}
    return defaults


def _steps(panel: Panel) -> list[dict[str, Any]]:
    if panel.red_above is None and panel.red_below is None:
        return []
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if panel.red_below is not None:
        steps = [{"color": "red", "value": None}, {"color": "green", "value": panel.red_below}]
    if panel.red_above is not None:
        steps.append({"color": "red", "value": panel.red_above})
    return steps


def _options(panel: Panel) -> dict[str, Any]:
    if panel.kind == "stat":
        reduced = {"calcs": ["lastNotNull"], "fields": "", "values": False}
        return {"reduceOptions": reduced, "colorMode": "value", "graphMode": "none"}
    if panel.kind == "heatmap":
        return {
            "calculate": False,
            "cellGap": 1,
            "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64},
            "yAxis": {"unit": panel.unit},
            "tooltip": {"show": True, "yHistogram": True},
        }
    if panel.kind == "state-timeline":
        return {"showValue": "auto", "mergeValues": True, "legend": {"showLegend": False}}
    if panel.kind == "table":
        return {"showHeader": True, "sortBy": [{"displayName": "Value", "desc": True}]}
    return {
        "legend": {"displayMode": "list", "placement": "bottom"},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }


def files() -> dict[Path, str]:
    """Every file and what is to stand in it."""
    return {
        FOLDER / f"{board.uid}.json": json.dumps(as_json(board), indent=2, ensure_ascii=False)
        + "\n"
        for board in DASHBOARDS
    }


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for path, text in files().items():
        path.write_text(text)
