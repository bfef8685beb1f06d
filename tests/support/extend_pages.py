"""The modules that pages of docs/extend/ show, in the folder of a config."""

import re
from pathlib import Path

EXTEND = Path(__file__).parent.parent.parent / "docs" / "extend"


def follow(page, folder):
    """Write the module of `docs/extend/<page>.md` into a folder, and return its name."""
    text = (EXTEND / f"{page}.md").read_text(encoding="utf-8")
    ((name, code),) = re.findall(r"<!-- file: (\w+)\.py -->\n```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (folder / f"{name}.py").write_text(code, encoding="utf-8")
    return str(name)
