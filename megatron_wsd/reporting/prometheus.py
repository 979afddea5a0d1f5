"""The status of a run in Prometheus's text format, and an endpoint that serves it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from megatron_wsd.errors import MegatronWSDError
from megatron_wsd.reporting.status import RunStatus

# name of the metric -> (type, key of an island in the status, help)
_OF_ISLANDS = {
    "step": ("gauge", "step", "Inner steps of the island."),
    "position": ("gauge", "position", "Inner steps of the run, which the schedule follows."),
    "outer_step": ("gauge", "outer_step", "Committed outer rounds."),
    "loss": ("gauge", "loss", "Training loss, nats a token."),
    "learning_rate": ("gauge", "lr", "Inner learning rate."),
    "tokens": ("gauge", "tokens", "Tokens over all islands."),
    "tokens_per_second": ("gauge", "tokens_per_s", "Tokens a second of the island."),
    "gradient_norm": ("gauge", "grad_norm", "Norm of the gradient before clipping."),
    "staleness": ("gauge", "staleness", "Age of the newest contribution, outer rounds."),
    "gate": ("gauge", "gate", "Staleness gate of the newest contribution."),
    "round_seconds": ("gauge", "round_s", "Duration of the newest outer round."),
    "exchanged_bytes_total": ("counter", "bytes", "Bytes sent and received over all ranks."),
    "rounds_committed_total": ("counter", "rounds_committed", "Outer rounds that committed."),
    "rounds_void_total": ("counter", "rounds_void", "Outer rounds that were void."),
    "record_age_seconds": ("gauge", "age_s", "Age of the newest record."),
}


def exposition(status: dict[str, Any]) -> str:
    """What `RunStatus.look` returned, as Prometheus text (format 0.0.4); what is not known is left out."""
    lines: list[str] = []
    run = _escaped(status["run"])

    def family(name: str, kind: str, about: str, values: Sequence[tuple[str, float | None]]) -> None:
        lines.append(f"# HELP megatron_wsd_{name} {about}")
        lines.append(f"# TYPE megatron_wsd_{name} {kind}")
        for labels, value in values:
            if value is not None:
                lines.append(f'megatron_wsd_{name}{{run="{run}"{labels}}} {float(value):.17g}')

    islands = [(f',island="{i["island"]}"', i) for i in status["islands"]]
    alive = ("running", "elsewhere")
    family("island_up", "gauge", "1 while the island trains.", [(n, i["state"] in alive) for n, i in islands])
    for name, (kind, key, about) in _OF_ISLANDS.items():
        family(name, kind, about, [(n, i[key]) for n, i in islands])
    family(
        "checkpoint_step",
        "gauge",
        "Inner steps of the newest complete checkpoint.",
        [(n, i["checkpoint"] and i["checkpoint"]["step"]) for n, i in islands],
    )
    phases = [(f'{n},phase="{_escaped(i["phase"])}"', 1.0) for n, i in islands if i["phase"]]
    family("phase", "gauge", "1 for the phase of the schedule.", phases)
    anchor = [(f',corpus="{_escaped(c)}"', a["loss"]) for c, a in status["anchor"].items()]
    family("anchor_loss", "gauge", "Newest validation of the anchor, nats a token.", anchor)
    return "\n".join(lines) + "\n"


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def make_server(run: RunStatus, host: str, port: int) -> ThreadingHTTPServer:
    """An HTTP server whose ``/metrics`` is the status at the time of the request; not started yet.

    Training has no part in it: the endpoint reads the run folder. It has no password.

    Raises:
        OSError: the port is taken.
    """

    one_at_a_time = threading.Lock()  # a look takes in what is new

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.split("?")[0] not in ("/", "/metrics"):
                self.send_error(404)
                return
            try:
                with one_at_a_time:
                    body = exposition(run.look()).encode()
            except (OSError, MegatronWSDError) as e:
                self.send_error(503, explain=str(e))
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """A scrape every few seconds is no news."""

    return ThreadingHTTPServer((host, port), Handler)
