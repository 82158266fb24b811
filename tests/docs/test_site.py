"""The documentation site builds without a warning; it documents every public name, and its links lead somewhere."""

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from sphinx.util.inventory import InventoryFile

import hvd_compress

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    out = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    command = ["bash", str(ROOT / "scripts" / "docs.sh"), str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out


class Page(HTMLParser):
    """The ids of a page, and what it links to or shows."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids, self.targets = set(), set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.ids.add(attributes.get("id"))
        self.targets |= {attributes[name] for name in ("href", "src") if attributes.get(name)}


def broken(site):
    pages = {file: Page(file.read_text()) for file in site.rglob("*.html")}
    found = []
    for file, page in pages.items():
        for target in page.targets:
            url = urlsplit(target)
            if url.scheme or url.netloc:
                continue
            there = (file.parent / unquote(url.path)).resolve() if url.path else file
            anchor = unquote(url.fragment)
            if not there.exists() or (anchor and there in pages and anchor not in pages[there].ids):
                found.append(f"{file.relative_to(site)}: {target}")
    return found


def test_links_lead_somewhere(site):
    assert (site / "local_steps.html").exists()
    assert not broken(site)


def test_broken_links_are_found(tmp_path):
    (tmp_path / "a.html").write_text('<h1 id="here"></h1><a href="#here"/><a href="b.html#gone"/><a href="c.html"/>')
    (tmp_path / "b.html").write_text('<a href="a.html#here"/><a href="https://example.org/#x"/>')
    assert sorted(broken(tmp_path)) == ["a.html: b.html#gone", "a.html: c.html"]


#: Opens pages in frames of two widths, and writes which tables and equations are wider than what they stand in, whether
#: that can be scrolled, and whether a page is wider than its frame.
FRAMES = """<body><script>
const pages = PAGES, widths = [1280, 390];
let left = pages.length * widths.length;
for (const page of pages) for (const width of widths) {
  const frame = document.createElement("iframe");
  frame.width = width; frame.height = 800; frame.src = page;
  frame.onload = () => {
    const inside = frame.contentDocument, box = inside.documentElement;
    if (box.scrollWidth > box.clientWidth + 1) write(`${width} ${page}: page`);
    for (const found of inside.querySelectorAll("table, dd .highlight-none pre")) {
      const around = found.localName == "table" ? found.parentElement : found;
      const scrolls = getComputedStyle(around).overflowX == "auto", cut = around.scrollWidth > around.clientWidth + 1;
      write(`${width} ${page} ${found.localName}: ${cut ? scrolls ? "scrolled" : "cut" : "whole"}`);
    }
    if (!--left) write("done");
  };
  document.body.append(frame);
}
function write(text) {
  const line = document.createElement("pre");
  line.textContent = text;
  document.body.append(line);
}
</script></body>"""


@pytest.mark.skipif(not shutil.which("chromium"), reason="chromium is not installed")
def test_tables_and_equations_are_whole_on_a_screen_and_can_be_scrolled_on_a_phone(site):
    pages = [f"{file.stem}.html" for file in sorted((ROOT / "docs").glob("*.md"))]
    (site / "frames.html").write_text(FRAMES.replace("PAGES", json.dumps(pages)))
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    command += ["--virtual-time-budget=60000", "--dump-dom", f"file://{site}/frames.html"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=170)
    (site / "frames.html").unlink()
    lines = re.findall(r"<pre>(.*?)</pre>", done.stdout)
    assert lines[-1] == "done"
    tables = [line for line in lines if line != "done"]
    assert {line.split()[0] for line in tables} == {"1280", "390"} and len(tables) > 2 * 20
    wrong = [line for line in tables if line.endswith(("page", "cut")) or (line[:4] == "1280" and "scrolled" in line)]
    assert wrong == []


def test_equations_are_not_coloured_and_examples_are(site):
    page = (site / "methods.html").read_text()
    (equation,) = re.findall(r"<pre>(.{0,200}importance.*?)</pre>", page, re.DOTALL)[:1]
    assert "<span class" not in equation.replace("<span></span>", "")
    assert re.search(r'highlight-python.*?<span class="[a-z0-9]+">hvd_compress</span>', page, re.DOTALL)


def public_names():
    """Every public name of the package's public modules, as a list of which one must be documented: a class's
    attribute may be so at any of its bases."""
    modules = [hvd_compress, hvd_compress.schedule]
    for module in modules:
        for name in getattr(module, "__all__", None) or vars(module):
            value = getattr(module, name)
            if inspect.ismodule(value) or (name.startswith("_") and name != "__version__"):
                continue
            yield [f"{module.__name__}.{name}"]
            for attribute in dir(value) if inspect.isclass(value) else ():
                having = [base for base in value.__mro__ if hasattr(base, attribute)]
                # A dataclass's fields are its arguments.
                field = attribute in getattr(value, "__dataclass_fields__", ())
                if field or attribute.startswith("_") or not having[-1].__module__.startswith("hvd_compress."):
                    continue
                yield [(base.__name__, attribute) for base in having]


def test_every_public_name_is_documented(site):
    inventory = InventoryFile.loads((site / "objects.inv").read_bytes(), uri="")
    documented = {name for kind, names in inventory.data.items() if kind.startswith("py:") for name in names}
    ends = {tuple(name.split(".")[-2:]) for name in documented}
    missing = [names for names in public_names() if documented.isdisjoint(names) and ends.isdisjoint(names)]
    assert not missing
    assert ("Compressor", "state_dict") in ends and ("Compressor", "no_such_method") not in ends
