"""Check built or downloaded variants against the digests in their metadata: `python -m tools.verify PATH ...`.

PATH is a variant (`torch-cuda`), a folder of variants, or a checkout or snapshot with `build/`. A digest lies beside
the files it describes: it finds damage and local edits, it does not prove who published them.
"""

import argparse
import sys
from pathlib import Path

from kernels._rust import Digest, DigestValidationError, Metadata


def verify(variant: Path | str) -> list[str]:
    """What differs between a variant's files and its digest, one line each; empty if nothing does."""
    variant = Path(variant)
    try:
        expected = Metadata.read_from_file(variant / "metadata.json").digest
    except ValueError as error:
        return [str(error)]
    if expected is None:
        return [f"{variant / 'metadata.json'} has no digest"]
    try:
        expected.validate(Digest.hash_variant(expected.algorithm, variant))
    except DigestValidationError as error:
        return [str(violation) for violation in error.violations]
    return []


def find_variants(path: Path | str) -> list[Path]:
    """The variants that `path` is or holds."""
    path = Path(path)
    for folders in ([path], sorted(path.glob("torch*")), sorted((path / "build").glob("torch*"))):
        found = [folder for folder in folders if (folder / "metadata.json").is_file()]
        if found:
            return found
    raise FileNotFoundError(f"no kernel variant: {path}, {path}/torch* and {path}/build/torch* have no metadata.json")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH")
    damaged = False
    for path in parser.parse_args().paths:
        for variant in find_variants(path):
            differences = verify(variant)
            print(f"{variant}: {'ok' if not differences else 'DIFFERS'}")
            for line in differences:
                print(f"  {line}")
            damaged |= bool(differences)
    return 1 if damaged else 0


if __name__ == "__main__":
    sys.exit(main())
