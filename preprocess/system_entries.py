"""What operating systems, file servers and programs put into folders of photographs: never an image, never a class.

Owns these names and how what was ignored is counted. Must not know: layouts.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator

from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.quantities import quantity

_SYSTEM_NAMES = frozenset(
    {
        # Windows
        "thumbs.db", "ehthumbs.db", "ehthumbs_vista.db", "desktop.ini", "$recycle.bin",
        "system volume information",
        # macOS, also on file servers that serve it
        "__macosx", "icon\r", "network trash folder", "temporary items", "thevolumesettingsfolder",
        # Linux and Android
        "lost+found", "lost.dir",
        # Synology, QNAP, NetApp
        "@eadir", "#recycle", "#snapshot", "@tmp", "@recycle", "@recently-snapshot", "@snapshot", "~snapshot",
        # Python
        "__pycache__",
    }
)  # fmt: skip
# What chkdsk saves, the origin that Windows attaches to a download, and what a Synology attaches to a file.
_SYSTEM_PATTERN = re.compile(r"found\.\d{3}|.*(:zone\.identifier|@synoeastream|@synoresource)", re.DOTALL)
_SHOWN_HIDDEN = frozenset({".ds_store", ".git", ".ipynb_checkpoints"})
_MOST_SHOWN = 5


def is_hidden(name: str) -> bool:
    """Return whether a name denotes a hidden entry or one of a system (`.DS_Store`, `._x`, `Thumbs.db`, `@eaDir`)."""
    folded = name.lower()
    return name.startswith(".") or folded in _SYSTEM_NAMES or _SYSTEM_PATTERN.fullmatch(folded) is not None


def visible(names: Iterable[str], ignored: Counter[str]) -> Iterator[bool]:
    """Yield, for each path of an archive, whether no part of it is hidden.

    Args:
        names: the paths of the members, with slashes.
        ignored: counts what is hidden as `count_ignored` does, a folder with all that it contains as one entry.
    """
    folders: set[str] = set()
    for name in names:
        parts = name.split("/")
        hidden = next((depth for depth, part in enumerate(parts) if is_hidden(part)), None)
        if hidden is not None:
            folder = "/".join(parts[: hidden + 1])
            if folder not in folders:
                count_ignored(parts[hidden], ignored)
            if hidden < len(parts) - 1:
                folders.add(folder)
        yield hidden is None


def count_ignored(name: str, ignored: Counter[str]) -> None:
    """Count a hidden entry by its name or, if a folder may have many such names, by their pattern."""
    folded = name.lower()
    if folded in _SYSTEM_NAMES or folded in _SHOWN_HIDDEN:
        ignored[name] += 1
    else:
        ignored["._*" if name.startswith("._") else ".*" if name.startswith(".") else "other"] += 1


def describe_ignored(ignored: Counter[str]) -> str | None:
    """Return a line that says how many entries were ignored, and which; None if there were none."""
    if not ignored:
        return None
    shown = [printable(name) + (f" ({count:,})" if count > 1 else "") for name, count in ignored.most_common()]
    more = f" and {len(shown) - _MOST_SHOWN} more names" if len(shown) > _MOST_SHOWN else ""
    return (
        f"Ignored: {quantity(ignored.total(), 'hidden or system entry')}, such as systems and file servers leave: "
        f"{', '.join(shown[:_MOST_SHOWN])}{more}"
    )
