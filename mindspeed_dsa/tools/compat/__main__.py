"""``python -m mindspeed_dsa.tools.compat refresh | trained | docs``: the commands behind make's targets."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mindspeed_dsa.features import shipped
from mindspeed_dsa.patches.errors import MindSpeedDSAError
from mindspeed_dsa.session import records
from mindspeed_dsa.tools.compat import pages, trained
from mindspeed_dsa.tools.compat.refresh import refresh


def main(argv: list[str] | None = None) -> int:
    """Update the record or the test results, then write the generated pages; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m mindspeed_dsa.tools.compat", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    reading = commands.add_parser("refresh", help="read the released wheels and write the record and pages")
    reading.add_argument("--wheels", type=Path, help="folder to keep wheels in (default: the user's cache)")
    reading.add_argument(
        "--megatron-lm",
        type=Path,
        metavar="CLONE",
        help="clone of Megatron-LM with its core_v tags and its branch main: for targets in "
        "megatron.training, and for the column of main; without it they stay as recorded",
    )
    merging = commands.add_parser("trained", help="take over what tests of the matrix have written")
    merging.add_argument("folder", type=Path, help="with RELEASE.json for each release")
    merging.add_argument(
        "--part", action="store_true", help="some of the matrix has run: keep what is known of the rest"
    )
    commands.add_parser("docs", help="write the generated pages from the record")
    options = parser.parse_args(argv)
    try:
        if options.command == "refresh":
            previous = records.load() if records.FILE.exists() else records.Records({})
            updated = refresh(previous, options.wheels, options.megatron_lm)
            records.FILE.write_text(records.dump(updated), encoding="utf-8")
            records.load.cache_clear()
        if options.command == "trained":
            table = trained.merge(
                trained.load(), options.folder, shipped(), records.load(), part=options.part
            )
            trained.FILE.write_text(trained.dump(table), encoding="utf-8")
            trained.load.cache_clear()
        for path in pages.write_all(pages.docs_folder()):
            print(f"wrote {path}")
    except MindSpeedDSAError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
