"""Objects of servers: a web server of our own that misbehaves in every way, and one as S3 is (s3rver).

It streams ranges and tells an ETag, but knows no conditions, and takes any secret for a key that it knows.
"""

import hashlib
import http.server
import json
import os
import random
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

from harness import MIB, Failed, case

NAME = "/folder/object.bin"
SECRET = "Signature=0123456789abcdef"


class Server(http.server.ThreadingHTTPServer):
    """Serves one object, by ranges, until its `faults` say otherwise; counts what it was asked for.

    `faults` are called with the number of the request, from 1 on, and the handler; one that returns True has
    answered.
    """

    daemon_threads = True

    def __init__(self, content, fault=None, tag='"first"', modified=True, ranges=True):
        super().__init__(("127.0.0.1", 0), Handler)
        self.content, self.fault, self.tag = content, fault, tag
        self.modified, self.ranges = modified, ranges
        self.gets = 0
        self.lock = threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}{NAME}"

    def handle_error(self, request, client_address):
        pass


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *words):
        pass

    def do_HEAD(self):
        self.answer(False)

    def do_GET(self):
        self.answer(True)

    def refuse(self, status, text=b""):
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(text)
        return True

    def answer(self, has_body):
        server = self.server
        with server.lock:
            server.gets += has_body
            number = server.gets
        if server.fault and server.fault(number, self):
            return
        if self.path.split("?")[0] != NAME:
            self.refuse(404)
            return
        self.send(has_body, server.content, server.tag)

    def send(self, has_body, content, tag, cut=None):
        asked = re.match(r"bytes=(\d+)-(\d+)$", self.headers.get("Range", ""))
        asked = asked if self.server.ranges else None
        first, last = (int(asked[1]), min(int(asked[2]), len(content) - 1)) if asked else (0, len(content) - 1)
        condition = self.headers.get("If-Match")
        if condition and condition != tag:
            self.refuse(412)
            return
        self.send_response(206 if asked else 200)
        if tag:
            self.send_header("ETag", tag)
        if self.server.modified:
            self.send_header("Last-Modified", "Sat, 28 Nov 2026 10:00:00 GMT")
        if asked:
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        self.send_header("Content-Length", str(last + 1 - first))
        self.end_headers()
        if has_body:
            body = memoryview(content)[first : last + 1]
            self.wfile.write(body if cut is None else body[:cut])
            if cut is not None:
                self.connection.shutdown(socket.SHUT_RDWR)


def sum_of(context, *words, status=0):
    result = context.bare([context.quire, "sum", *words])
    if result.status != status:
        raise Failed(f"quire sum {words}: {result.status}, not {status}: {result.stderr[-1000:]}")
    return result


def torn(number, handler):
    """Every third answer ends in its middle, and its connection with it."""
    if number % 3 == 1:
        handler.send(True, handler.server.content, handler.server.tag, cut=1000)
        return True
    return False


def busy(number, handler):
    return number % 2 == 1 and handler.refuse(503, b"slow down")


def silent(number, handler):
    """One of the first requests is never answered."""
    if number == 2:
        time.sleep(60)
        return True
    return False


def signed(_, handler):
    """The URL is good for GET alone, and only with what is secret in it."""
    if handler.command == "HEAD" or SECRET not in handler.path:
        return handler.refuse(403)
    return False


def replaced(number, handler):
    """The object is another one from the fifth request on, of the same length."""
    if number >= 5:
        handler.server.content, handler.server.tag = bytes(len(handler.server.content)), '"second"'
    return False


def replaced_unconditionally(number, handler):
    """The same by a server that knows no conditions."""
    del handler.headers["If-Match"]
    return replaced(number, handler)


def gone(number, handler):
    return number >= 5 and handler.refuse(404)


def broken(number, handler):
    return number >= 3 and handler.refuse(500, b"the disk is on fire")


def refused(_, handler):
    return handler.refuse(403, b"no")


def made(context, seed, size):
    """Bytes that do not pack, and their sum."""
    content = random.Random(seed).randbytes(size)
    path = context.tmp / "object.bin"
    path.write_bytes(content)
    return content, sum_of(context, path).text.split()[0]


@case("url-web")
def url_web(context):
    """A web server that is slow, torn or busy: the same bytes. One that refuses or changes: an error that says so."""
    content, expected = made(context, 5, 48 * MIB + 12345)
    good = {
        "ranges": {},
        "torn": {"fault": torn},
        "busy": {"fault": busy},
        "silent": {"fault": silent},
        "signed": {"fault": signed},
        "weak tag": {"tag": 'W/"first"'},
        "no tag": {"tag": None},
        "no time": {"modified": False},
    }
    for name, ways in good.items():
        server = Server(content, **ways)
        url = f"{server.url}?{SECRET}" if name == "signed" else server.url
        result = sum_of(context, "--memory", "16M", "--stats", url)
        if result.text.split()[0] != expected:
            raise Failed(f"{name}: {result.text}")
        if SECRET in result.text + result.stderr:
            raise Failed(f"{name}: what is secret is shown: {result.stderr}")
        if name == "ranges" and not 24 <= server.gets <= 60:
            raise Failed(f"{server.gets} requests for {len(content)} bytes")
        server.shutdown()
    bad = {
        "replaced": ({"fault": replaced}, "another object under this name"),
        "replaced, no conditions": ({"fault": replaced_unconditionally}, "another object under this name"),
        "gone": ({"fault": gone}, "no such object any more"),
        "broken": ({"fault": broken}, "the disk is on fire"),
        "refused": ({"fault": refused}, "refuses it"),
        "whole": ({"ranges": False}, "answers no range requests"),
        "no name": ({"tag": None, "modified": False}, "neither an ETag nor a time"),
    }
    for name, (ways, words) in bad.items():
        server = Server(content, **ways)
        result = sum_of(context, "--memory", "16M", f"{server.url}?{SECRET}", status=1)
        if words not in result.stderr or result.text or SECRET in result.stderr:
            raise Failed(f"{name}: {result.text}{result.stderr}")
        server.shutdown()
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        others = {
            f"http://127.0.0.1:{nobody.getsockname()[1]}/object": "onnection refused",
            "https://name.invalid/object": "check the server",
            "http://user:password@127.0.0.1/object": "must not have a password",
            "http://127.0.0.1": "names no object",
        }
        for url, words in others.items():
            result = sum_of(context, url, status=1)
            if words not in result.stderr or "user:password" in result.stderr:
                raise Failed(f"{url}: {result.stderr}")


@case("url-cache")
def url_cache(context):
    """What a server sent is on the disk: for the next time, for several at once, after a kill, within its bound."""
    content, expected = made(context, 6, 40 * MIB + 99)
    server = Server(content)
    cache = context.tmp / "cache"

    def asked(*words):
        before = server.gets
        result = sum_of(context, "--memory", "16M", "--cache", cache, *words, server.url)
        if result.text.split()[0] != expected:
            raise Failed(f"other bytes: {result.text}")
        return server.gets - before

    def entries():
        return [entry for entry in cache.glob("quire-cache/*/*") if entry.is_file()]

    first, second = asked(), asked()
    # What came last may not be on the disk yet when the program ends.
    if first < 20 or second > 2:
        raise Failed(f"{first} requests, and {second} with all on the disk")
    # Bytes that went bad are fetched again.
    for entry in entries()[::7]:
        with entry.open("r+b") as file:
            file.seek(1000)
            file.write(b"other bytes")
    if asked() < 3 or asked() > 2:
        raise Failed("bad entries were not fetched again, or not kept")
    # Killed in the middle, and two at once.
    shutil.rmtree(cache)
    argv = [context.quire, "sum", "--memory", "16M", "--cache", cache, server.url]
    killed = context.spawn(argv)
    while not entries():
        time.sleep(0.002)
    killed.kill()
    killed.wait()
    runs = [context.spawn(argv) for _ in range(2)]
    for run in runs:
        result = context.wait(run)
        if result.status != 0 or result.text.split()[0] != expected:
            raise Failed(f"two at once: {result.status} {result.text}{result.stderr}")
    # A bound that is less than the object, and one that is too small.
    asked("--cache-max", "20M")
    size = sum(entry.stat().st_size for entry in entries())
    if size > 20 * MIB:
        raise Failed(f"{size} bytes of 20 MiB")
    result = sum_of(context, "--cache", cache, "--cache-max", "1M", server.url, status=1)
    if "16 MiB or more" not in result.stderr:
        raise Failed(result.stderr)
    # Another object under the name: nothing of the old one is shown.
    (server.content, expected), server.tag = made(context, 7, len(content)), '"second"'
    asked()
    server.shutdown()


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Bucket:
    """s3rver with a bucket; objects are put where it keeps them, for it would hold uploads in memory."""

    def __init__(self, context):
        self.root = context.tmp / "s3"
        (self.root / "bucket").mkdir(parents=True)
        port = free_port()
        argv = ["s3rver", "--directory", self.root, "--port", port, "--address", "127.0.0.1"]
        self.process = context.spawn([*map(str, argv), "--configure-bucket", "bucket"])
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "S3RVER",
            "AWS_SECRET_ACCESS_KEY": "S3RVER",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        }
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                urllib.request.urlopen(self.environment["AWS_ENDPOINT_URL"], timeout=5)
                return
            except urllib.error.HTTPError:
                return
            except OSError:
                time.sleep(0.1)
        raise Failed("s3rver does not start")

    def put(self, key, source):
        place = self.root / "bucket" / f"{key}._S3rver_"
        place.parent.mkdir(parents=True, exist_ok=True)
        # As a server does, by a rename.
        for name, content in (("metadata.json", json.dumps({}).encode()), ("object", None)):
            partial = Path(f"{place}partial")
            if content is None:
                shutil.copyfile(source, partial)
                Path(f"{place}object.md5").write_text(hashlib.file_digest(open(source, "rb"), "md5").hexdigest())
            else:
                partial.write_bytes(content)
            partial.rename(f"{place}{name}")

    def stop(self):
        self.process.kill()
        self.process.wait()


@case("url-s3", needs=("s3rver",))
def url_s3(context):
    """An object of a bucket, plain and packed, in a sixteenth of its size; wrong credentials; one that is replaced."""
    size = (4096 if context.long else 256) * MIB
    path, packed = context.tmp / "object.bin", context.tmp / "object.bin.zst"
    block = random.Random(8).randbytes(MIB)
    with path.open("wb") as file:
        for number in range(size // MIB):
            file.write(number.to_bytes(8, "little") + block[8:])
    expected = sum_of(context, path).text.split()[0]
    bucket = Bucket(context)
    os.environ.update(bucket.environment)
    try:
        bucket.put("a folder/object.bin", path)
        memory = min(size // 16, 64 * MIB)
        result = sum_of(context, "--memory", memory, "--stats", "s3://bucket/a folder/object.bin")
        if result.text.split()[0] != expected:
            raise Failed(f"other bytes: {result.text}")
        context.note(f"{size // MIB} MiB: {result.stderr.strip()}; {result.peak_bytes / MIB:.0f} MiB at most")
        if context.bare([context.quire, "pack", path, "-o", packed]).status != 0:
            raise Failed("cannot pack")
        bucket.put("object.bin.zst", packed)
        if sum_of(context, "s3://bucket/object.bin.zst").text.split()[0] != expected:
            raise Failed("other bytes of the archive")
        for key, words in (("nothing", "no such object"), ("", "names no object")):
            result = sum_of(context, f"s3://bucket/{key}", status=1)
            if words not in result.stderr:
                raise Failed(result.stderr)
        replace_while_read(context, bucket, path)
        credentials(context, bucket)
    finally:
        for name in bucket.environment:
            os.environ.pop(name, None)
        bucket.stop()


def replace_while_read(context, bucket, path):
    """A reader that is at its middle when the object is replaced gets an error, and nothing of the other."""
    parts = {"old": path.open("rb").read(64 * MIB), "new": bytes(64 * MIB)}
    for name, content in parts.items():
        (context.tmp / name).write_bytes(content)
    bucket.put("changing", context.tmp / "old")
    argv = [context.quire, "cat", "--memory", "8M", "s3://bucket/changing"]
    reader = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    # It waits in between, for the pipe is full.
    read = reader.stdout.read(16 * MIB)
    bucket.put("changing", context.tmp / "new")
    read += reader.stdout.read()
    said = reader.stderr.read().decode()
    if reader.wait() != 1 or "another object under this name" not in said:
        raise Failed(f"replaced in the middle: {reader.returncode} {said}")
    if read != parts["old"][: len(read)]:
        raise Failed("bytes of another object")


def credentials(context, bucket):
    """They come from a file, too; wrong ones, and none, are an error that says so, and they are not shown."""
    file = context.tmp / "credentials"
    file.write_text("[default]\naws_access_key_id = nobody\n[other]\naws_access_key_id=S3RVER\naws_secret_access_key = S3RVER\n")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        del os.environ[name]
    tried = (
        ({"AWS_SHARED_CREDENTIALS_FILE": str(file), "AWS_PROFILE": "other"}, 0, ""),
        ({}, 1, "there are no credentials"),
        ({"AWS_ACCESS_KEY_ID": "nobody", "AWS_SECRET_ACCESS_KEY": "a wrong secret"}, 1, "check the credentials"),
    )
    for environment, status, words in tried:
        kept = dict(os.environ)
        os.environ.update(environment)
        result = sum_of(context, "s3://bucket/object.bin.zst", status=status)
        os.environ.clear()
        os.environ.update(kept)
        if words not in result.stderr or "a wrong secret" in result.stderr:
            raise Failed(f"{environment}: {result.stderr}")
