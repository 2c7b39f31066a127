"""Write the pages that the command line names; all without one."""

from __future__ import annotations

import sys

from scripts.pages import options, picture, tutorial

PAGES = {"options": options, "tutorial": tutorial, "picture": picture}

if unknown := set(sys.argv[1:]) - PAGES.keys():
    sys.exit(f"no such pages: {', '.join(sorted(unknown))}; there are: {', '.join(PAGES)}")
for name in sys.argv[1:] or PAGES:
    page = PAGES[name]
    page.PAGE.write_text(page.text(), encoding="utf-8")
    print(page.PAGE)
