#!/usr/bin/env python3
"""Looks at the page of `ferry dashboard` in Chromium: under load, and in trouble. Each check prints a line; the first that fails ends
the run. Screenshots stay in SCRATCH/pictures. It runs in namespaces of its own, of mounts, processes and the network: the page shows all
mounts of a machine.
usage: browser.py FERRY SCRATCH"""

import os, re, signal, subprocess, sys, time
from pathlib import Path

from apart import collect_the_dead, leave_mounts, loopback_up
from holders import holder_of
from playwright.sync_api import expect, sync_playwright

FERRY, SCRATCH = sys.argv[1], Path(sys.argv[2]) / "browser"
PICTURES = Path(sys.argv[2]) / "pictures"
CHROMIUM = "/usr/bin/chromium"
# The dashboard asks each 5 s, the page each 2.5 s.
SOON_MS = 30_000
PHONE, DESK = {"width": 390, "height": 844}, {"width": 1280, "height": 900}


def ferry(*args, **options):
    return subprocess.run([FERRY, *map(str, args)], check=True, capture_output=True, text=True, timeout=60, **options)


def daemon_of(mount):
    """The process that serves a mount."""
    return int(re.search(r'"daemon": ?(\d+)', ferry("stats", mount, "--json").stdout)[1])


class Page:
    """A page in a browser, and what goes wrong in it."""

    def __init__(self, browser, address, origin, **options):
        self.origin, self.wrong = origin, []
        self.page = browser.new_page(**options)
        self.page.set_default_timeout(SOON_MS)
        self.page.on("console", lambda said: said.type in ("error", "warning") and self.wrong.append(said.text))
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("request", lambda asked: self.is_own(asked.url) or self.wrong.append(f"asks {asked.url}"))
        self.page.goto(address)

    def is_own(self, url):
        return url.startswith((self.origin, "data:"))

    def article(self, at):
        return self.page.locator("article", has=self.page.get_by_role("heading", name=str(at), exact=True))

    def says(self, at, text):
        expect(self.article(at)).to_contain_text(text, timeout=SOON_MS)

    def picture(self, name, part=None):
        path = PICTURES / f"{name}.png"
        if part:
            part.screenshot(path=path)
        else:
            self.page.screenshot(path=path, full_page=True)
        assert path.stat().st_size > 10_000, f"{path} is empty"

    def fits(self):
        """Nothing but tables, which scroll in their boxes, is wider than the window."""
        wide, window = self.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert wide <= window, f"{wide} pixels in a window of {window}"

    def end(self):
        assert not self.wrong, self.wrong
        self.page.close()


def done(what):
    print(f"      {what}", flush=True)


def color(page):
    return page.page.evaluate("getComputedStyle(document.body).backgroundColor")


def under_load(browser, address, origin, mounts):
    page = Page(browser, address, origin, viewport=DESK)
    busy = page.article(mounts[0])
    chart = busy.get_by_role("img", name=re.compile("Requests of the kernel"))
    expect(chart).to_have_attribute("aria-label", re.compile(r"make, remove, rename [\d.,]*[1-9]"), timeout=SOON_MS)
    expect(busy).to_contain_text("create")
    done("the chart and the table have the requests of the load")

    page.page.keyboard.press("Tab")
    expect(page.page.get_by_role("link").first).to_be_focused()
    page.page.get_by_role("link", name=str(mounts[0]), exact=True).focus()
    page.page.keyboard.press("Enter")
    expect(busy).to_be_in_viewport()
    assert "token=" in page.page.url, "the address has lost the token"
    for _ in range(60):
        page.page.keyboard.press("Tab")
        if chart.evaluate("node => node === document.activeElement"):
            break
    expect(chart).to_be_focused()
    outline = chart.evaluate("node => getComputedStyle(node).outlineStyle")
    assert outline != "none", "what has the focus looks like all else"
    page.page.keyboard.press("ArrowLeft")
    expect(chart).to_have_attribute("aria-label", re.compile(" ago: "))
    done("the keyboard reaches a mount and a time in its chart")
    page.end()

    for scheme, window in [("light", DESK), ("dark", DESK), ("light", PHONE), ("dark", PHONE)]:
        page = Page(browser, address, origin, color_scheme=scheme, viewport=window)
        for mount in mounts:
            expect(page.article(mount)).to_have_class("ok", timeout=SOON_MS)
        expect(page.page.locator("#summary")).to_contain_text("0 bad")
        page.fits()
        page.picture(f"load-{scheme}-{window['width']}")
        page.end()
    colors = []
    for scheme in ("light", "dark"):
        page = Page(browser, address, origin, color_scheme=scheme)
        colors.append(color(page))
        page.end()
    assert colors[0] != colors[1], colors
    done("it is readable on a phone and at a desk, light and dark")


def in_trouble(browser, address, origin, at):
    """What has been broken is said, and comes first."""
    for scheme, window in [("light", DESK), ("dark", PHONE)]:
        page = Page(browser, address, origin, color_scheme=scheme, viewport=window)
        expect(page.article(at["dead"]).locator(".state.bad")).to_be_visible(timeout=SOON_MS)
        page.says(at["mirror"], "absent or stale")
        page.says(at["remote"], "away")
        page.says(at["full"], "nearly full")
        first, last = page.page.locator("article").first, page.page.locator("article").last
        expect(first).to_have_class("bad")
        expect(last).not_to_have_class("bad")
        page.fits()
        page.picture(f"trouble-{scheme}-{window['width']}")
        page.end()
    done("a dead daemon, a mirror without a side, a server that is away and a full volume are said")


def space(browser, address, origin, at, remote):
    """The map of space, by keyboard and pointer, at both widths."""
    for scheme, window in [("light", DESK), ("dark", PHONE)]:
        page = Page(browser, address, origin, color_scheme=scheme, viewport=window)
        part = page.article(at).get_by_role("region", name="Space by directory")
        tiles, asked = part.locator(".map > button"), []
        page.page.on("request", lambda request: "map.json" in request.url and asked.append(request))
        expect(page.article(at)).to_have_class("ok", timeout=SOON_MS)
        expect(page.article(remote).get_by_role("button", name="Map of space")).to_be_hidden()
        expect(tiles).to_have_count(0)
        assert not asked, "nobody asked for a map"
        part.get_by_role("button", name="Map of space").focus()
        page.page.keyboard.press("Enter")
        expect(tiles.first).to_have_accessible_name(re.compile(r"^videos: 20\.?\d* MiB, .* %, 6 files, 2 directories"), timeout=SOON_MS)
        expect(tiles.first).to_be_focused()
        expect(part.get_by_role("status")).to_contain_text("counted")
        page.fits()
        fit_in_tiles(part, tiles)
        page.picture(f"space-{scheme}-{window['width']}", part)
        page.page.keyboard.press("ArrowRight")
        expect(tiles.nth(1)).to_be_focused()
        page.page.keyboard.press("ArrowLeft")
        page.page.keyboard.press("Enter")
        expect(tiles.first).to_have_accessible_name(re.compile("^holidays: "))
        expect(tiles.first).to_be_focused()
        expect(part.get_by_role("table")).to_contain_text("<b>odd")
        fit_in_tiles(part, tiles)
        page.picture(f"space-inside-{scheme}-{window['width']}", part)
        for key in ("Backspace", "Escape"):
            expect(tiles.first).to_have_accessible_name(re.compile("^holidays: "))
            page.page.keyboard.press(key)
            expect(tiles.first).to_have_accessible_name(re.compile("^videos: "))
            expect(tiles.first).to_be_focused()
            tiles.first.click()
        part.get_by_role("button", name="all of it").click()
        expect(tiles.first).to_have_accessible_name(re.compile("^videos: "))
        part.get_by_role("table").get_by_role("button", name="videos").click()
        expect(tiles.first).to_have_accessible_name(re.compile("^holidays: "))
        page.end()
    done("the map of space is counted when asked for, and the keyboard and the pointer walk through it")


def fit_in_tiles(part, tiles):
    """No tile is outside the map, and no name outside its tile."""
    box = part.locator(".map").bounding_box()
    for tile in tiles.all():
        inner = tile.bounding_box()
        assert inner["x"] >= box["x"] - 1 and inner["x"] + inner["width"] <= box["x"] + box["width"] + 1, (inner, box)
        assert inner["y"] >= box["y"] - 1 and inner["y"] + inner["height"] <= box["y"] + box["height"] + 1, (inner, box)
        for line, name in enumerate(tile.locator(".name").all()):
            label = name.bounding_box()
            assert label["x"] + label["width"] <= inner["x"] + inner["width"] + 1, (label, inner)
            assert label["y"] - inner["y"] <= 20 * line + 3, ("below its corner", label, inner)
            assert label["y"] + label["height"] <= inner["y"] + inner["height"] + 1, (label, inner)


def fill(files):
    """Directories of known sizes, and names that are no HTML."""
    sizes = {"videos/holidays": 4, "videos/<b>odd": 2, "music/" + "long " * 12: 5, "mail/in": 2, "mail/out": 1}
    for name, mebibytes in sizes.items():
        (files / name).mkdir(parents=True)
        for number in range(1 if "videos" not in name else 3):
            (files / name / str(number)).write_bytes(bytes(mebibytes << 20))
    (files / "videos/new").write_bytes(bytes(6 << 20))
    (files / "videos/new").rename(files / "videos/holidays/0")
    for number in range(30):
        (files / f"small-{number}").mkdir()
        (files / f"small-{number}/file").write_bytes(bytes(number << 14))


def refused(browser, origin):
    page = browser.new_page()
    page.goto(f"{origin}/#token=0")
    expect(page.get_by_role("alert")).to_contain_text("the token is wrong", timeout=SOON_MS)
    page.close()
    done("a wrong token gets no figures, and a word")


def stale(browser, address, origin, dashboard):
    page = Page(browser, address, origin)
    expect(page.page.locator("#fresh")).to_contain_text("figures of", timeout=SOON_MS)
    dashboard.send_signal(signal.SIGSTOP)
    expect(page.page.get_by_role("alert")).to_contain_text("old: the daemons or ferry dashboard do not answer", timeout=SOON_MS)
    page.picture("stale")
    dashboard.send_signal(signal.SIGCONT)
    expect(page.page.get_by_role("alert")).to_be_hidden(timeout=SOON_MS)
    page.page.close()
    done("figures that are old say so")


def make(name, *options):
    mount = SCRATCH / f"mnt-{name}"
    mount.mkdir(parents=True)
    volume = SCRATCH / f"{name}.ferry"
    ferry("mkfs", volume, *options)
    return volume, mount


def work(files):
    """Makes, syncs and removes files while the page is looked at, at most for a minute."""
    script = "end=$((SECONDS + 60)); n=0; while [ $SECONDS -lt $end ]; do n=$((n + 1)); echo $n >f$((n % 50)); rm -f f$(((n + 25) % 50)); done"
    return subprocess.Popen(["bash", "-c", script], cwd=files)


def main():
    collect_the_dead()
    leave_mounts()
    loopback_up()
    PICTURES.mkdir(parents=True)
    fine, at_fine = make("fine", "--size", "256M")
    dead, at_dead = make("dead", "--size", "64M")
    full, at_full = make("full", "--size", "64M")
    sides = [SCRATCH / "side-a", SCRATCH / "side-b"]
    mirror, at_mirror = make("mirror", "--size", "128M", "--device", "mirror", *sides)
    served, at_remote = make("served", "--size", "64M")
    for volume, mount in [(fine, at_fine), (dead, at_dead), (full, at_full), (mirror, at_mirror)]:
        ferry("mount", volume, mount)
    server = subprocess.Popen(
        [FERRY, "serve", served, "--insecure", "--listen", "127.0.0.1:0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    port = None
    for line in server.stdout:
        found = re.search(r"address=127\.0\.0\.1:(\d+)", line)
        if found:
            port = found[1]
            break
    ferry("mount", f"ferry://127.0.0.1:{port}/", at_remote, "-o", "insecure")
    dashboard = subprocess.Popen([FERRY, "dashboard", "--listen", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True)
    address = re.search(r"http://\S+", dashboard.stdout.readline())[0]
    origin = address.split("/#")[0]
    fill(at_mirror)
    load = work(at_fine)
    try:
        with sync_playwright() as tools:
            browser = tools.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
            under_load(browser, address, origin, [at_fine, at_dead, at_full, at_mirror, at_remote])
            space(browser, address, origin, at_mirror, at_remote)
            refused(browser, origin)
            stale(browser, address, origin, dashboard)
            os.kill(holder_of(daemon_of(at_dead)), signal.SIGKILL)
            server.kill()
            ferry("umount", at_mirror)
            sides[1].unlink()
            ferry("mount", mirror, at_mirror)
            subprocess.run(["dd", "if=/dev/zero", f"of={at_full}/file", "bs=1M"], capture_output=True, timeout=60)
            in_trouble(browser, address, origin, {"dead": at_dead, "mirror": at_mirror, "remote": at_remote, "full": at_full})
            browser.close()
    finally:
        for process in (load, dashboard, server):
            process.kill()
            process.wait()
        for mount in (at_fine, at_full, at_mirror, at_dead, at_remote):
            subprocess.run([FERRY, "umount", "--force", mount], capture_output=True, timeout=60)


main()
