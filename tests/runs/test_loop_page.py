"""The loop that docs/architecture.md shows is the loop that runs."""

from __future__ import annotations

import inspect
import re
import textwrap
from pathlib import Path

from fedglimpse.runs.experiment import Pack

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"


def test_the_loop_on_the_page_is_the_real_one() -> None:
    block = re.search(r"```python\n(while .*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    assert block[1] in textwrap.dedent(inspect.getsource(Pack.run_rounds)).replace("\n    ", "\n")
