"""Writes ``grafana/dashboards/*.json``: ``python -m grafana.generate``, from the repository.

The dashboards are made from the tables in ``boards``, so that they stay alike and a change can
be read; a test fails when the files are not what this program writes. Others, made by hand in
Grafana, may lie beside them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from grafana.boards.late import WHY
from grafana.boards.overview import OVERVIEW
from grafana.boards.parts import Dashboard, Panel
from grafana.boards.store import STORE
from grafana.boards.topic import TOPICS

FOLDER = Path(__file__).parent / "dashboards"
DASHBOARDS = (OVERVIEW, TOPICS, STORE, WHY)
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH = 24
PALETTE = {"mode": "palette-classic"}


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
            }
        ],
        "templating": {"list": _variables(dashboard)},
        "panels": panels,
    }


def _variables(dashboard: Dashboard) -> list[dict[str, Any]]:
    source = {"name": "datasource", "type": "datasource", "query": "prometheus"}
    found: list[dict[str, Any]] = [source | {"label": "Data source"}]
    found.append(_variable("job", "label_values(tickwheel_build_info, job)", several=False))
    found += [_variable(name, query, several=True) for name, query in dashboard.variables]
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
            "expr": expression,
            "legendFormat": legend or "__auto",
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
    if panel.about:
        made["description"] = panel.about
    if panel.kind == "table":
        hidden = {"excludeByName": {"Time": True, "__name__": True, "job": True}}
        made["transformations"] = [{"id": "organize", "options": hidden}]
    return made


def _defaults(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "color": PALETTE}
    steps = _steps(panel)
    if steps:
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
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
    if panel.red_above is not None:
        return [{"color": "green", "value": None}, {"color": "red", "value": panel.red_above}]
    if panel.red_below is not None:
        return [{"color": "red", "value": None}, {"color": "green", "value": panel.red_below}]
    return []


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
