"""Publish the kernel to the Hub: `python -m tools.publish ORG/NAME [--dry-run]`, or put an earlier release back.

A release of version N is one commit on the branch `vN` with every backend variant. The branch `main` carries the card
and the sources of the newest version, and is committed first: whatever interrupts a publish, users of `vN` see either
the old release or the new one, and running again completes it.
"""

import argparse
import fnmatch
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import jinja2
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from kernels._rust import Metadata

from tools.build import build, package_name, read_config
from tools.hub import Change, Files, KernelRepo, PublishError, Target, read_files, write_files
from tools.interface import additions, breaking_changes, functions_and_layers, read_interface
from tools.source_hash import ROOT
from tools.verify import verify

# Tests that take seconds and together load the artefact, run it and hold its metadata to the loader's rules.
FAST_TESTS = ("tests/test_packaging.py",)
BENCHMARKS = "benchmarks/benchmark*.py"
SOURCES = (
    "torch-ext/*", "tests/*", "tools/*", "requirements/*", "benchmarks/*.py", "examples/*", "build.toml", "flake.nix",
    "flake.lock", "CARD.md", "CHANGELOG.md", "LICENSE", "Makefile", "pyproject.toml", "docs/*.md",
)  # fmt: skip


def matches(path: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


def say(step: str, detail: str) -> None:
    print(f"{step:9s} {detail}", flush=True)


# ---------------------------------------------------------------------------------------------- what the checkout holds


@dataclass
class Release:
    """What is to be published: a version, the files of its branch, and those of main."""

    version: int
    package: Path  # the sources
    build: Files
    main: Files
    variants: dict[str, Metadata]  # name of the variant -> its metadata

    @property
    def branch(self) -> str:
        return f"v{self.version}"


def git(root: Path, *arguments: str) -> str:
    run = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True)
    if run.returncode:
        raise PublishError(f"git {arguments[0]} failed in {root}: {run.stderr.strip()}")
    return run.stdout


def require_clean(root: Path) -> str:
    """The checkout's commit, where nothing differs from it."""
    if dirty := git(root, "status", "--porcelain").splitlines():
        shown = ", ".join(line[3:] for line in dirty[:5]) + (" ..." if len(dirty) > 5 else "")
        raise PublishError(f"{root} has {len(dirty)} uncommitted change(s) ({shown}); commit or remove them first")
    return git(root, "rev-parse", "HEAD").strip()


def measured_tables(readme: str) -> str:
    """The README's section "Measured" without its figures; empty as long as it has no table."""
    section = readme.partition("\n## Measured\n")[2].partition("\n## ")[0]
    text = re.sub(r"(<!--.*?-->|!\[.*?\]\(.*?\))\n*", "", section, flags=re.DOTALL).strip()
    return text if "\n|" in f"\n{text}" else ""


def render_card(root: Path, repo_id: str, general: dict) -> bytes:
    """CARD.md with the variables that kernel-builder fills, and the README's measured tables."""
    functions, layers = functions_and_layers(root / "torch-ext" / package_name(general))
    readme = (root / "README.md").read_text() if (root / "README.md").is_file() else ""
    template = jinja2.Environment(trim_blocks=True, keep_trailing_newline=True, autoescape=False)
    return (
        template.from_string((root / "CARD.md").read_text())
        .render(
            repo_id=repo_id,
            version=general["version"],
            functions=functions,
            layers=layers,
            has_benchmark=(root / "benchmarks" / "benchmark.py").is_file(),
            source=general.get("source"),
            license=general["license"].lower(),
            measured=measured_tables(readme),
        )
        .encode()
    )


def run_fast_tests(root: Path, built: Path) -> None:
    """The fast tests, in their own process, on the variants in `built`/build."""
    env = os.environ | {"CCE_BUILT": str(built), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    for name in ("TRITON_INTERPRET", "HF_ENDPOINT"):
        env.pop(name, None)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *FAST_TESTS]
    run = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)
    if run.returncode:
        raise PublishError("the fast tests fail on the built artefact:\n" + run.stdout[-4000:] + run.stderr[-1000:])
    say("test", run.stdout.strip().splitlines()[-1])


def prepare(root: Path, repo_id: str) -> Release:
    """Build, validate and test a clean checkout."""
    commit = require_clean(root)
    say("checkout", f"clean at {commit[:12]}")
    general = read_config(root)
    with tempfile.TemporaryDirectory() as scratch:
        folders = build(root, Path(scratch) / "build")
        for folder in folders:
            if differences := verify(folder):
                raise PublishError(f"{folder.name} is not what its digest says: {'; '.join(differences)}")
        variants = {folder.name: Metadata.read_from_file(folder / "metadata.json") for folder in folders}
        say("build", ", ".join(metadata.id for metadata in variants.values()))
        run_fast_tests(root, Path(scratch))
        files = read_files(Path(scratch))
    tracked = {
        name: (root / name).read_bytes()
        for name in git(root, "ls-files", "-z").split("\0")
        if matches(name, SOURCES) and not (root / name).is_symlink()
    }
    benchmarks = {name: content for name, content in tracked.items() if matches(name, (BENCHMARKS,))}
    card = {"README.md": render_card(root, repo_id, general)}
    package = root / "torch-ext" / package_name(general)
    return Release(general["version"], package, files | benchmarks, tracked | card, variants)


# ------------------------------------------------------------------------------------------------ what the Hub allows


def version_branches(heads: dict[str, str]) -> dict[int, str]:
    """Version -> head commit of its branch."""
    return {int(name[1:]): head for name, head in heads.items() if name[:1] == "v" and name[1:].isdigit()}


def require_own_ids(repo: KernelRepo, release: Release, heads: dict[str, str]) -> None:
    """A module id names one content: a process that loads two kernels of one id would mix them."""
    ids = {metadata.id: metadata for metadata in release.variants.values()}
    for version, head in version_branches(heads).items():
        for path, content in repo.read(head, "build/*/metadata.json").items():
            other = Metadata.from_bytes(content)
            if other.id not in ids:
                continue
            where = f"{path} on branch v{version} of {repo.repo_id}"
            if version != release.version:
                raise PublishError(
                    f"the id {other.id} is already used by {where}: version {release.version} has the sources of "
                    f"version {version}, and a process that loads both would mix them"
                )
            if other.digest is None or other.digest.files != ids[other.id].digest.files:
                raise PublishError(f"the id {other.id} is already used by other content, {where}")


def require_compatible(repo: KernelRepo, release: Release, head: str | None) -> None:
    """Callers of this version must find on its branch what they found there before."""
    variant = f"build/{next(iter(release.variants))}"
    published = repo.read(head, f"{variant}/*") if head else {}
    if f"{variant}/__init__.py" not in published:
        say("interface", f"first release of version {release.version}")
        return
    with tempfile.TemporaryDirectory() as folder:
        write_files(published, Path(folder))
        old, new = read_interface(Path(folder) / variant), read_interface(release.package)
    if broken := breaking_changes(old, new):
        raise PublishError(
            f"version {release.version} on the Hub would break its callers; raise `version` in build.toml, or keep:\n  "
            + "\n  ".join(broken)
        )
    added = additions(old, new)
    say("interface", "compatible" + (f", adds {', '.join(added)}" if added else ", unchanged"))


# ------------------------------------------------------------------------------------------------------------- publish


def version_target(branch: str, files: Files, variants: Iterable[str], is_new: bool) -> Target:
    """A version's branch. A new one starts as a copy of main, of which it keeps nothing but .gitattributes.

    On an existing branch, variants that others built for it stay.
    """
    folders = tuple(f"build/{name}/*" for name in variants)
    if is_new:
        return Target(branch, files, lambda path: path != ".gitattributes")
    return Target(branch, files, lambda path: matches(path, (*folders, BENCHMARKS)))


def show(target: Target, change: Change, head: str | None) -> None:
    marks = {"+": change.added, "~": change.changed, "-": change.deleted}
    counts = "  ".join(f"{mark}{len(paths)}" for mark, paths in marks.items())
    say(target.branch, (counts if change else "nothing to do") + ("" if head else "  (new)"))
    for mark, paths in marks.items():
        for path in paths[:8]:
            print(f"          {mark} {path}")
        if len(paths) > 8:
            print(f"          {mark} ... {len(paths) - 8} more")


def publish(root: Path, repo: KernelRepo, *, dry_run: bool = False, private: bool = False) -> bool:
    """Publish the checkout at `root`; whether anything changed (with `dry_run`: would change) on the Hub."""
    release = prepare(root, repo.repo_id)
    found = repo.branches()
    heads = found or {}
    head = heads.get(release.branch)
    require_own_ids(repo, release, heads)
    require_compatible(repo, release, head)

    targets = []
    if release.version >= max(version_branches(heads), default=0):
        targets.append(Target("main", release.main, lambda path: matches(path, SOURCES)))
    is_new = head is None or not any(matches(path, ("build/*/metadata.json",)) for path in repo.tree(head))
    targets.append(version_target(release.branch, release.build, release.variants, is_new))

    changes = [repo.compare(target, heads.get(target.branch)) for target in targets]
    if found is None:
        say("create", f"{repo.repo_id}{' (private)' if private else ''}")
    for target, change in zip(targets, changes, strict=True):
        show(target, change, heads.get(target.branch))
    if dry_run or not any(changes):
        say("done", "nothing was changed (dry run)" if dry_run else f"{repo.repo_id} already holds this release")
        return any(changes)

    if found is None:
        repo.create(private)
        heads = repo.branches() or {}
    message = f"Release version {release.version} from {git(root, 'rev-parse', '--short', 'HEAD').strip()}"
    for target, change in zip(targets, changes, strict=True):
        if change:
            say("push", f"{target.branch} is at {repo.push(target, heads.get(target.branch), message)}")
    say("done", f'get_kernel("{repo.repo_id}", version={release.version})')
    return True


def roll_back(repo: KernelRepo, commit: str, *, dry_run: bool = False) -> bool:
    """Put the release at `commit` back on its version's branch, by a new commit with its files; main stays."""
    heads = repo.branches()
    if heads is None:
        raise PublishError(f"there is no kernel repository {repo.repo_id}")
    files = repo.read(commit, "build/*", BENCHMARKS)
    found = {path.split("/")[1]: Metadata.from_bytes(files[path]) for path in files if path.endswith("/metadata.json")}
    versions = sorted({metadata.version for metadata in found.values()})
    if len(versions) != 1 or f"v{versions[0]}" not in heads:
        raise PublishError(f"{commit} of {repo.repo_id} holds no release of one version (found: {versions or 'none'})")
    with tempfile.TemporaryDirectory() as folder:
        write_files(files, Path(folder))
        for name in found:
            if differences := verify(Path(folder) / "build" / name):
                raise PublishError(f"build/{name} at {commit} is damaged: {'; '.join(differences)}")
    target = version_target(f"v{versions[0]}", files, found, is_new=False)
    head = heads[target.branch]
    change = repo.compare(target, head)
    show(target, change, head)
    if dry_run or not change:
        say("done", "nothing was changed (dry run)" if dry_run else f"{target.branch} already holds this release")
        return bool(change)
    say("push", f"{target.branch} is at {repo.push(target, head, f'Roll back to {commit}')}")
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repo", metavar="ORG/NAME", help="the kernel repository, made where it is missing")
    parser.add_argument("--dry-run", action="store_true", help="check all, show what would change, change nothing")
    parser.add_argument("--private", action="store_true", help="make a new repository private")
    parser.add_argument("--rollback", metavar="SHA", help="publish again the release at this commit of the repository")
    args = parser.parse_args()
    repo = KernelRepo(args.repo, HfApi(library_name="cut-cross-entropy"))
    try:
        if args.rollback:
            roll_back(repo, args.rollback, dry_run=args.dry_run)
        else:
            publish(ROOT, repo, dry_run=args.dry_run, private=args.private)
    except (PublishError, HfHubHTTPError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
