#!/usr/bin/env python3
"""Looks at all pages of a site: each link to a page, a file or an anchor of it leads somewhere, and nothing is loaded from elsewhere.
usage: site-links.py DIRECTORY"""

import re, sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Attributes by which a browser loads something without being asked.
LOADED = {("img", "src"), ("script", "src"), ("link", "href"), ("iframe", "src"), ("source", "src"), ("video", "src"), ("object", "data")}


class Page(HTMLParser):
    def __init__(self, path):
        super().__init__()
        self.anchors, self.links, self.loaded = {""}, [], []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name == "id" or (tag, name) == ("a", "name"):
                self.anchors.add(value)
            elif (tag, name) == ("a", "href"):
                self.links.append((self.getpos()[0], value))
            elif (tag, name) in LOADED:
                self.loaded.append((self.getpos()[0], value))


def main():
    root = Path(sys.argv[1]).resolve()
    pages = {path: Page(path) for path in sorted(root.rglob("*.html"))}
    wrong, links = [], 0
    for path, page in pages.items():
        for line, link in page.links + page.loaded:
            where, parts = f"{path.relative_to(root)}:{line}", urlsplit(link)
            if parts.scheme or parts.netloc:
                if (line, link) in page.loaded and parts.scheme != "data":
                    wrong.append(f"{where}: is loaded from elsewhere: {link}")
                continue
            links += 1
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.is_file() or root not in target.parents:
                wrong.append(f"{where}: leads nowhere: {link}")
            elif target in pages and unquote(parts.fragment) not in pages[target].anchors:
                wrong.append(f"{where}: there is no such anchor: {link}")
    for path in sorted(root.rglob("*.css")):
        wrong += [f"{path.relative_to(root)}: is loaded from elsewhere: {url}" for url in re.findall(r"url\(['\"]?((?:https?:)?//[^)]*)", path.read_text())]
    print("\n".join(wrong + [f"{len(pages)} pages, {links} links, {len(wrong)} are wrong"]))
    return 1 if wrong or not links else 0


sys.exit(main())
