"""The part of the Hub's API that publishing and loading kernels uses, over repositories held in memory.

Commits are snapshots (path -> content); a branch is a name for one. A commit request is applied whole or not at all,
and only on the parent that it names. `Hub.faults` makes chosen requests fail the way networks and servers do.
"""

import base64
import hashlib
import itertools
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


def blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass
class Repo:
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    log: list[tuple[str, str]] = field(default_factory=list)  # branch, commit

    def commit(self, branch: str, files: dict[str, bytes]) -> str:
        sha = hashlib.sha1(f"{len(self.commits)} {branch} {sorted(files)}".encode()).hexdigest()
        self.commits[sha], self.branches[branch] = files, sha
        self.log.append((branch, sha))
        return sha

    def find(self, revision: str) -> str | None:
        name = revision.removeprefix("refs/heads/")
        return self.branches.get(name, name if name in self.commits else None)


@dataclass
class Fault:
    """What happens to the next `times` requests whose "METHOD path" matches `pattern`.

    action: a status to answer with; "drop" (the connection closes halfway through the request), "lose" (the request is
    carried out, its answer is lost), "cut" (half of the answer arrives); or a function, called as the request arrives,
    that returns one of these or None.
    """

    pattern: str
    action: int | str | Callable[[], str | None]
    times: int = 1
    headers: dict[str, str] = field(default_factory=dict)


class Error(Exception):
    def __init__(self, status: int, code: str = "", **body):
        self.status, self.code, self.body = status, code, body


class Hub:
    """A running server: `url`, its `repos`, the `faults` to come, the `requests` that came."""

    def __init__(self, trusted: tuple[str, ...] = ()):
        self.repos: dict[str, Repo] = {}
        self.trusted, self.faults, self.requests = set(trusted), [], []
        self.lock = threading.RLock()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True
            wbufsize = -1

            def log_message(self, *arguments):
                pass

            def serve(self):
                hub.serve(self)

            do_GET = do_HEAD = do_POST = serve

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request, client_address):
                pass  # clients that were killed or gave up

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.server.shutdown()
        self.server.server_close()

    def fault(self, request: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.times and re.search(fault.pattern, request):
                    fault.times -= 1
                    return fault
        return None

    def serve(self, handler) -> None:
        request = f"{handler.command} {handler.path}"
        self.requests.append(request)
        fault = self.fault(request)
        action = fault.action if fault else None
        length = int(handler.headers.get("Content-Length", 0))
        body = handler.rfile.read(length // 2 if action == "drop" else length)
        if callable(action):
            action = action()
        if action == "drop" or len(body) < length:
            handler.close_connection = True
            return
        try:
            if isinstance(action, int):
                raise Error(action, "", error="planted")
            if handler.command == "POST" and not handler.headers.get("Authorization", "").startswith("Bearer "):
                raise Error(401, "", error="a token is needed")
            with self.lock:
                status, answer, headers = 200, *self.answer(handler.command, handler.path, body)
            if resumed := re.fullmatch(r"bytes=(\d+)-", handler.headers.get("Range", "")):
                start, total = int(resumed[1]), len(answer)
                status, answer = 206, answer[start:]
                headers |= {"Content-Range": f"bytes {start}-{total - 1}/{total}"}
        except Error as error:
            status, answer = error.status, json.dumps(error.body).encode()
            headers = {"X-Error-Code": error.code} if error.code else {}
            headers |= fault.headers if fault else {}
        if action == "lose":
            handler.close_connection = True
            return
        handler.send_response(status)
        for name, value in {"Content-Length": str(len(answer)), **headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(answer[: len(answer) // 2] if action == "cut" else answer)
            handler.close_connection |= action == "cut"

    def answer(self, method: str, target: str, body: bytes) -> tuple[bytes, dict[str, str]]:
        parts = [unquote(part) for part in urlsplit(target).path.strip("/").split("/")]
        recursive = "recursive=true" in target.lower()
        match [method, *parts]:
            case ["POST", "api", "repos", "create"]:
                return self.create(json.loads(body))
            case ["POST", "api", "validate-yaml"]:
                return self.json(errors=[], warnings=[])
            case ["GET", "api", "organizations", name, "overview"]:
                return self.json(name=name, fullname=name, trustedKernelPublisher=name in self.trusted)
            case ["GET", "api", "kernels", org, name, "refs"]:
                branches = self.repo(org, name).branches
                listed = [{"name": b, "ref": f"refs/heads/{b}", "targetCommit": sha} for b, sha in branches.items()]
                return self.json(branches=listed, converts=[], tags=[])
            case ["POST", "api", "kernels", org, name, "branch", branch]:
                return self.branch(self.repo(org, name), branch, json.loads(body or b"{}"))
            case ["GET", "api", "kernels", org, name, "tree", revision, *path]:
                return self.tree(self.files(org, name, revision)[1], "/".join(path), recursive)
            case ["POST", "api", "kernels", org, name, "preupload", revision]:
                present = self.files(org, name, revision)[1]
                asked = [item["path"] for item in json.loads(body)["files"]]
                oid = {path: blob_id(present[path]) if path in present else None for path in asked}
                return self.json(
                    files=[{"path": p, "uploadMode": "regular", "shouldIgnore": False, "oid": oid[p]} for p in asked]
                )
            case ["POST", "api", "kernels", org, name, "commit", branch]:
                sha = self.commit(self.repo(org, name), branch, [json.loads(line) for line in body.splitlines()])
                return self.json(commitOid=sha, commitUrl=f"{self.url}/kernels/{org}/{name}/commit/{sha}")
            case ["GET", "api", "kernels", org, name, "revision", revision]:
                return self.json(id=f"{org}/{name}", sha=self.files(org, name, revision)[0])
            case ["GET" | "HEAD", "kernels", org, name, "resolve", revision, *path]:
                sha, files = self.files(org, name, revision)
                if "/".join(path) not in files:
                    raise Error(404, "EntryNotFound")
                content = files["/".join(path)]
                return content, {"X-Repo-Commit": sha, "ETag": f'"{blob_id(content)}"', "Accept-Ranges": "bytes"}
        raise Error(404, "", error=f"no such call: {method} {target}")

    @staticmethod
    def json(**answer) -> tuple[bytes, dict[str, str]]:
        return json.dumps(answer).encode(), {"Content-Type": "application/json"}

    def repo(self, org: str, name: str) -> Repo:
        if f"{org}/{name}" not in self.repos:
            raise Error(404, "RepoNotFound")
        return self.repos[f"{org}/{name}"]

    def files(self, org: str, name: str, revision: str) -> tuple[str, dict[str, bytes]]:
        repo = self.repo(org, name)
        sha = repo.find(revision)
        if sha is None:
            raise Error(404, "RevisionNotFound")
        return sha, repo.commits[sha]

    def create(self, asked: dict) -> tuple[bytes, dict[str, str]]:
        repo_id = f"{asked['organization']}/{asked['name']}"
        url = f"{self.url}/kernels/{repo_id}"
        if repo_id in self.repos:
            raise Error(409, "", url=url)
        assert asked["type"] == "kernel", asked
        self.repos[repo_id] = Repo()
        self.repos[repo_id].commit("main", {".gitattributes": b"*.bin filter=lfs\n"})
        return self.json(url=url)

    def branch(self, repo: Repo, branch: str, asked: dict) -> tuple[bytes, dict[str, str]]:
        if branch in repo.branches:
            raise Error(409, "", error="Reference already exists")
        start = repo.find(asked.get("startingPoint", "main"))
        if start is None:
            raise Error(404, "RevisionNotFound")
        repo.branches[branch] = start
        return self.json()

    def tree(self, files: dict[str, bytes], folder: str, recursive: bool) -> tuple[bytes, dict[str, str]]:
        prefix = f"{folder}/" if folder else ""
        inside = {path: content for path, content in files.items() if path.startswith(prefix)}
        if folder and not inside:
            raise Error(404, "EntryNotFound")
        parents = itertools.chain.from_iterable(itertools.accumulate(p.split("/")[:-1], "{}/{}".format) for p in inside)
        items = [{"type": "directory", "path": p, "oid": "0" * 40, "size": 0} for p in set(parents) if p != folder]
        items += [{"type": "file", "path": p, "oid": blob_id(c), "size": len(c)} for p, c in inside.items()]
        shown = [item for item in items if item["path"].startswith(prefix)]
        if not recursive:
            shown = [item for item in shown if "/" not in item["path"].removeprefix(prefix)]
        return json.dumps(shown).encode(), {"Content-Type": "application/json"}

    def commit(self, repo: Repo, branch: str, lines: list[dict]) -> str:
        if branch not in repo.branches:
            raise Error(404, "RevisionNotFound")
        head = repo.branches[branch]
        files = dict(repo.commits[head])
        for line in lines:
            value = line["value"]
            if line["key"] == "header" and value.get("parentCommit", head) != head:
                raise Error(412, "", error="A commit has happened since. Please refresh and try again.")
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "deletedFile":
                if files.pop(value["path"], None) is None:
                    raise Error(404, "EntryNotFound", error="A file with this name doesn't exist")
            elif line["key"] == "deletedFolder":
                files = {path: c for path, c in files.items() if not path.startswith(value["path"].rstrip("/") + "/")}
        return repo.commit(branch, files)
