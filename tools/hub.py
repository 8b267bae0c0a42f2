"""A kernel repository on the Hub as its publisher needs it: what is there, and commits that are safe to repeat.

A push states what a branch shall hold. What is missing is worked out from what the branch holds at that moment, and
sent as one commit on top of the head that was examined. So a repeated push has nothing to do, a push whose answer was
lost is recognised as done, and a branch that someone else moved is never overwritten.
"""

import fnmatch
import hashlib
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from httpx2 import TransportError
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError
from huggingface_hub.hf_api import RepoFile

KERNEL = "kernel"
RETRY_SECONDS = (1.0, 2.0, 4.0, 8.0)
TRANSIENT = {408, 425, 429, 500, 502, 503, 504}
CONFLICT = {409, 412}  # the branch has left the parent that the commit names; the next look at it tells why

Result = TypeVar("Result")
Files = dict[str, bytes]  # path in the repository -> content


class PublishError(RuntimeError):
    """A reason not to publish, or not to go on, that the publisher has to resolve."""


def blob_id(content: bytes) -> str:
    """The git object id under which the Hub lists a regular file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def write_files(files: Files, folder: Path) -> None:
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)


def read_files(folder: Path) -> Files:
    """Every file below `folder` but caches, by its posix path relative to it."""
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    caches = {".cache", "__pycache__"}
    return {name: path.read_bytes() for name, path in files.items() if caches.isdisjoint(Path(name).parts)}


def wait_seconds(error: Exception, default: float) -> float | None:
    """How long to wait before the request that met `error` is repeated; None where repeating cannot help."""
    if not isinstance(error, HfHubHTTPError):
        return default if isinstance(error, (TransportError, LocalEntryNotFoundError)) else None
    if error.response.status_code not in TRANSIENT | CONFLICT:
        return None
    asked = error.response.headers.get("Retry-After", "")
    return min(float(asked), 60.0) if asked.isdigit() else default


def patiently(action: Callable[[], Result]) -> Result:
    """The result of `action`, repeated while the Hub is busy, broken for a moment or out of reach."""
    for default in RETRY_SECONDS:
        try:
            return action()
        except Exception as error:
            seconds = wait_seconds(error, default)
            if seconds is None:
                raise
            time.sleep(seconds)
    try:
        return action()
    except Exception as error:
        if wait_seconds(error, 0) is None:
            raise
        raise PublishError(f"the Hub did not answer in {len(RETRY_SECONDS) + 1} attempts: {error}") from error


@dataclass(frozen=True)
class Target:
    """What a branch shall hold: these files, and nothing else of what this publisher owns there."""

    branch: str
    files: Files
    owns: Callable[[str], bool]


@dataclass
class Change:
    """What is missing between a branch and its target."""

    added: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.added or self.changed or self.deleted)


class KernelRepo:
    """One kernel repository, through one authenticated `HfApi`."""

    def __init__(self, repo_id: str, api: HfApi):
        self.repo_id, self.api = repo_id, api

    def branches(self) -> dict[str, str] | None:
        """Branch -> head commit, or None where the repository does not exist."""
        try:
            refs = patiently(lambda: self.api.list_repo_refs(self.repo_id, repo_type=KERNEL))
        except RepositoryNotFoundError:
            return None
        return {branch.name: branch.target_commit for branch in refs.branches}

    def tree(self, commit: str) -> dict[str, str]:
        """Path -> git object id of every file at `commit`."""
        items = patiently(
            lambda: list(self.api.list_repo_tree(self.repo_id, recursive=True, revision=commit, repo_type=KERNEL))
        )
        return {item.path: item.blob_id for item in items if isinstance(item, RepoFile)}

    def read(self, commit: str, *patterns: str) -> Files:
        """The files at `commit` whose paths match one of `patterns`."""
        if not any(fnmatch.fnmatchcase(path, pattern) for path in self.tree(commit) for pattern in patterns):
            return {}
        with tempfile.TemporaryDirectory() as folder:
            patiently(
                lambda: self.api.snapshot_download(
                    self.repo_id, repo_type=KERNEL, revision=commit, allow_patterns=list(patterns), local_dir=folder
                )
            )
            return read_files(Path(folder))

    def create(self, private: bool) -> None:
        """Make the repository, `private` or as its organization's default has it."""
        patiently(lambda: self.api.create_repo(self.repo_id, repo_type=KERNEL, private=private or None, exist_ok=True))

    def compare(self, target: Target, commit: str | None) -> Change:
        """What `commit` (None: an empty branch) lacks of `target`."""
        present = self.tree(commit) if commit else {}
        wanted = {path: blob_id(content) for path, content in sorted(target.files.items())}
        return Change(
            added=[path for path in wanted if path not in present],
            changed=[path for path in wanted if path in present and present[path] != wanted[path]],
            deleted=[path for path in sorted(present) if target.owns(path) and path not in wanted],
        )

    def push(self, target: Target, examined: str | None, message: str) -> str:
        """Make `target.branch` meet its target by one commit on top of `examined`; return the branch's head.

        A branch that did not exist (`examined` is None) starts at the head of main. Raises PublishError where the
        branch moved otherwise than by this push.
        """

        def attempt() -> str:
            heads = self.branches() or {}
            if target.branch not in heads:
                self.api.create_branch(self.repo_id, branch=target.branch, repo_type=KERNEL, exist_ok=True)
                heads = self.branches() or {}
            head = heads[target.branch]
            change = self.compare(target, head)
            if not change:
                return head
            if head != (examined or heads["main"]):
                raise PublishError(
                    f"branch {target.branch} of {self.repo_id} moved from {examined or 'nothing'} to {head} while "
                    "publishing: another publisher was faster. Nothing of theirs was overwritten; look at their "
                    "commit, then run again."
                )
            additions = [CommitOperationAdd(path, target.files[path]) for path in change.added + change.changed]
            return self.api.create_commit(
                self.repo_id,
                operations=additions + [CommitOperationDelete(path) for path in change.deleted],
                commit_message=message,
                revision=target.branch,
                repo_type=KERNEL,
                parent_commit=head,
            ).oid

        return patiently(attempt)
