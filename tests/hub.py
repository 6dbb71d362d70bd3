"""A data hub on the loopback interface: just what the real client asks of one, for data sets of plain files."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "a" * 40
Files = dict[str, bytes]


@contextmanager
def serve(data: dict[str, Files]) -> Iterator[str]:
    """data: owner/name -> file -> bytes. Gives the address."""

    class Hub(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            kind, body = _answer(self.path.partition("?")[0], data)
            self.send_response(200 if kind else 404)
            self.send_header("Content-Type", kind or "text/plain")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("X-Repo-Commit" if kind else "X-Error-Code", COMMIT if kind else "EntryNotFound")
            self.send_header("ETag", '"e"')
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_HEAD = do_GET

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def _answer(path: str, data: dict[str, Files]) -> tuple[str, bytes]:
    """(content type, body); ("", b"") when there is no such thing."""
    for name, files in data.items():
        listed = [{"type": "file", "path": file, "size": len(content), "oid": "b" * 40} for file, content in files.items()]
        about = {"id": name, "sha": COMMIT, "private": False, "tags": [], "siblings": [{"rfilename": file} for file in files]}
        if path in (f"/api/datasets/{name}", f"/api/datasets/{name}/revision/{COMMIT}"):
            return "application/json", json.dumps(about).encode()
        if path == f"/api/datasets/{name}/tree/{COMMIT}":
            return "application/json", json.dumps(listed).encode()
        if path.startswith(f"/datasets/{name}/resolve/") and (file := path.rpartition("/")[2]) in files:
            return "application/octet-stream", files[file]
    return "", b""
