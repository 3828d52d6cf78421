"""A store of objects and a web server in one, on this machine: enough of S3 for s3fs to read.

It may be told to be slow, to cut answers short, to refuse for a while, and not to know at once what
it lists.
"""

import hashlib
import threading
import time
import urllib.parse
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class ObjectStore:
    """Serves `objects`, contents by key such as "bucket/name", at `url` until it is closed.

    `refusals` are the codes with which the next requests for contents are answered, `cuts` how many
    of them end half way, `unknown` how many find nothing; each waits for `delay` seconds.
    """

    def __init__(self):
        self.objects: dict[str, bytes] = {}
        self.refusals: list[int] = []
        self.cuts = 0
        self.unknown = 0
        self.delay = 0.0
        self.asked: Counter[str] = Counter()  # requests for contents, by key
        handler = type("Handler", (_Handler,), {"store": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self):
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: ObjectStore

    def log_message(self, *_):
        pass

    def do_GET(self):
        place = urllib.parse.urlsplit(self.path)
        key = urllib.parse.unquote(place.path).lstrip("/")
        query = dict(urllib.parse.parse_qsl(place.query, keep_blank_values=True))
        if "list-type" in query:
            self._list(key, query.get("prefix", ""))
        else:
            self._send(key)

    do_HEAD = do_GET

    def _send(self, key: str):
        store = self.store
        if "/" not in key:  # is there such a bucket?
            return self._answer(200)
        store.asked[key] += 1
        time.sleep(store.delay)
        if store.refusals:
            return self._answer(store.refusals.pop(0))
        if store.unknown:
            store.unknown -= 1
            return self._answer(404)
        if key not in store.objects:
            return self._answer(404)
        content = store.objects[key]
        headers = {
            "ETag": f'"{hashlib.md5(content).hexdigest()}"',
            "Last-Modified": "Wed, 25 Nov 2026 00:00:00 GMT",
            "Accept-Ranges": "bytes",
        }
        code = 200
        if span := self.headers.get("Range"):
            first, _, last = span.partition("=")[2].partition("-")
            stop = min(int(last) + 1 if last else len(content), len(content))
            headers["Content-Range"] = f"bytes {first}-{stop - 1}/{len(content)}"
            content = content[int(first) : stop]
            code = 206
        if self.command == "GET" and store.cuts and len(content) > 1:
            store.cuts -= 1
            return self._answer(code, content, headers, sent=len(content) // 2)
        return self._answer(code, content, headers)

    def _list(self, bucket: str, prefix: str):
        bucket = bucket.strip("/")
        found = "".join(
            f"<Contents><Key>{key.removeprefix(bucket + '/')}</Key><Size>{len(content)}</Size>"
            "<LastModified>2026-11-25T00:00:00.000Z</LastModified></Contents>"
            for key, content in sorted(self.store.objects.items())
            if key.startswith(f"{bucket}/{prefix}")
        )
        text = (
            "<?xml version='1.0'?><ListBucketResult><IsTruncated>false</IsTruncated>"
            f"<Name>{bucket}</Name><Prefix>{prefix}</Prefix>{found}</ListBucketResult>"
        )
        self._answer(200, text.encode(), {"Content-Type": "application/xml"})

    def _answer(self, code: int, content=b"", headers=None, sent: int | None = None):
        self.send_response(code)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[:sent])
        if sent is not None:
            self.close_connection = True
