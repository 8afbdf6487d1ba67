"""Make a site of the repository's own files: mkdocs calls these functions (`hooks` in mkdocs.yml).

A page lies on the site where its file lies in the repository, so relative links hold in both. The pages of the
navigation come first; then whatever they link, and what that links: Markdown as a page, code as a page of its text, a
folder as a list of its files, anything else as it is. A link to what does not exist ends the build.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent

CODE = {"": "text", ".py": "python", ".sh": "bash", ".sbatch": "bash", ".toml": "toml", ".txt": "text"}
"""What becomes a page of its text, by the end of the name; and the language by which it is coloured."""

API = {
    "fp8booster": ("fp8booster", "fp8booster.nn.report.report"),
    "plugins": ("fp8booster.plugins",),
    "hf": ("fp8booster.hf",),
    "nn": ("fp8booster.nn.fused", "fp8booster.nn.linear.layer.FP8Layer"),
    "scaling": ("fp8booster.scaling",),
    "comm": ("fp8booster.comm",),
    "optim": ("fp8booster.optim",),
    "monitor": ("fp8booster.monitor.traffic",),
}
"""The pages of the API, and what they show; functions by themselves where a module of the same name hides them."""

ALSO = ("docs/site.css",)
"""Files that no page links."""

_LINK = re.compile(r'(!?\[(?:[^\[\]]|\[[^\]]*\])*\]\()([^)\s#]+)((?:#[^)\s]*)?\))|(src=")([^"]+)(")')
_FENCE = re.compile(r"^ *```")
_FETCHED = re.compile(r'<(?:script|link|img|iframe)\b[^>]*(?:src|href)="(?:https?:)?//')


def _prose(markdown: str) -> Iterator[tuple[str, bool]]:
    """Lines, and whether each is text rather than code."""
    fenced = False
    for line in markdown.splitlines(keepends=True):
        fence = bool(_FENCE.match(line))
        yield line, not (fenced or fence or line.startswith("    "))
        fenced ^= fence


def _target(page: str, link: str) -> Path | None:
    """The repository's file that a link of a page means; None for what is elsewhere, or on this page."""
    if "://" in link or link.startswith(("#", "mailto:")):
        return None
    return ROOT / posixpath.normpath(posixpath.join(posixpath.dirname(page), link))


def _links(page: str, markdown: str) -> Iterator[Path]:
    for line, is_text in _prose(markdown):
        if is_text:
            for match in _LINK.finditer(line):
                target = _target(page, match[2] or match[5])
                if target is not None:
                    yield target


def _uri(file: Path) -> str:
    """Return the place of a repository's file or folder on the site, as mkdocs names sources."""
    path = file.relative_to(ROOT).as_posix()
    if file.is_dir():
        return f"{path}/README.md" if (file / "README.md").exists() else f"{path}/index.md"
    if file.suffix in CODE:
        return f"{path}.md"
    return path


def _content(file: Path) -> str | None:
    """The Markdown of a file or folder; None for what stays as it is."""
    path = file.relative_to(ROOT).as_posix()
    if file.is_dir():
        if (file / "README.md").exists():
            return (file / "README.md").read_text(encoding="utf-8")
        names = sorted(each.name for each in file.iterdir() if each.is_dir() or each.suffix == ".md")
        return f"# {path}\n\n" + "".join(f"- [{name}]({name})\n" for name in names)
    if file.suffix == ".md":
        return file.read_text(encoding="utf-8")
    if file.suffix in CODE:
        text = file.read_text(encoding="utf-8")
        return f"---\nsearch: {{exclude: true}}\n---\n\n# {path}\n\n````{CODE[file.suffix]}\n{text}\n````\n"
    return None


def _shown(path: str) -> str:
    """The documentation of a module, class or function, below a heading of its own."""
    return f"\n::: {path}\n    options:\n      show_root_heading: true\n      show_root_toc_entry: true\n"


def _navigation(entries: list | dict | str) -> Iterator[str]:
    if isinstance(entries, str):
        yield entries
    else:
        for entry in entries.values() if isinstance(entries, dict) else entries:
            yield from _navigation(entry)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace what mkdocs found by the navigation's pages and all that they link."""
    found = [file for file in files if file.src_uri.startswith("assets/")]
    for name, (first, *others) in API.items():
        heading = f"# fp8booster{'' if name == 'fp8booster' else f'.{name}'}"
        text = f"{heading}\n\n::: {first}\n" + "".join(map(_shown, others))
        found.append(File.generated(config, f"api/{name}.md", content=text))
    pages = [name for name in _navigation(config.nav) if not name.startswith("api/")]
    waiting = [(ROOT / name, "mkdocs.yml") for name in (*pages, *ALSO)]
    seen = set()
    while waiting:
        file, linked_from = waiting.pop()
        if not file.exists() or not file.resolve().is_relative_to(ROOT):
            raise PluginError(f"{linked_from} links {file.relative_to(ROOT)}, which does not exist")
        uri = _uri(file)
        if uri in seen:
            continue
        seen.add(uri)
        content = _content(file)
        if content is None:
            found.append(File.generated(config, uri, abs_src_path=str(file)))
            continue
        found.append(File.generated(config, uri, content=content))
        if file.suffix not in CODE or file.is_dir():
            waiting += [(target, uri) for target in _links(uri, content)]
    return Files(found)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links to code and to folders point to their pages."""
    here = page.file.src_uri
    if here.startswith("api/") or here.endswith(tuple(f"{end}.md" for end in CODE if end)):
        return markdown

    def points_to_page(match: re.Match) -> str:
        before, link, after = (match[1], match[2], match[3]) if match[1] else (match[4], match[5], match[6])
        target = _target(here, link)
        if target is None or match[4]:
            return match[0]
        return before + posixpath.relpath(_uri(target), posixpath.dirname(here) or ".") + after

    return "".join(_LINK.sub(points_to_page, line) if is_text else line for line, is_text in _prose(markdown))


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Refuse a page that a browser would complete from the network."""
    fetched = _FETCHED.search(output)
    if fetched:
        raise PluginError(f"{page.file.src_uri} loads from the network: {fetched[0]}")
    return output
