"use strict";
// The page of `ferry dashboard`. It fetches the samples that it lacks and draws them. Texts of
// others, such as the names of volumes, enter the page as text alone.

const STALE_MS = 15000;
const HOUR_MS = 3600000;
const SPAN_MIN_MS = 300000;
const WIDTH = 600;
const HEIGHT = 100;
const token = new URLSearchParams(location.hash.slice(1)).get("token");

const byId = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}
const el = (tag, attributes = {}, ...children) =>
  fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);

// Numbers for people.

const digits = (value) => {
  const places = value > 0 && value < 9.95 ? 1 : 0;
  return value.toLocaleString("en", { minimumFractionDigits: places, maximumFractionDigits: places });
};
const whole = (value) => Math.round(value).toLocaleString("en");
function scaled(value, units, step) {
  let at = 0;
  while (value >= step && at < units.length - 1) {
    value /= step;
    at += 1;
  }
  return `${digits(value)} ${units[at]}`;
}
const bytes = (value) => scaled(value, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"], 1024);
const nanos = (value) =>
  value < 1e9 ? scaled(value, ["ns", "µs", "ms"], 1000) : seconds(value / 1e9);
const seconds = (value) => {
  for (const [unit, length] of [["d", 86400], ["h", 3600], ["min", 60]]) {
    if (value >= 2 * length) return `${Math.floor(value / length)} ${unit}`;
  }
  return `${digits(value)} s`;
};
const perSecond = (value) => `${digits(value)}/s`;
const bytesPerSecond = (value) => `${bytes(value)}/s`;
const percent = (value) => `${digits(value)} %`;

// Samples. Each is an object of its time and figures; a figure may be null.

const known = (value) => value !== null && value !== undefined;
/// How much a counter has grown. Null: it began again, or is not known.
function growth(name, now, before) {
  if (!before || !known(now[name]) || !known(before[name])) return null;
  return now[name] < before[name] ? null : now[name] - before[name];
}
const rate = (name) => (now, before) => {
  const grown = growth(name, now, before);
  return grown === null ? null : (grown * 1000) / (now.time - before.time);
};
const gauge = (name) => (now) => (known(now[name]) ? now[name] : null);
function otherRequests(now, before) {
  const kinds = ["reads", "writes", "syncs", "names"].map((kind) => rate(kind)(now, before) || 0);
  const all = rate("requests")(now, before);
  return all === null ? null : Math.max(0, all - kinds.reduce((sum, one) => sum + one, 0));
}
function commitTime(now, before) {
  const commits = growth("commits", now, before);
  const time = growth("commit_ns", now, before);
  return commits && time !== null ? time / commits : null;
}
const logFill = (now, _before, figures) => {
  const size = figures.log && figures.log.bytes;
  return size && known(now.log_free) ? (100 * (size - now.log_free)) / size : null;
};

const CHARTS = [
  ["Requests of the kernel", perSecond, [
    ["read", rate("reads")], ["write", rate("writes")], ["sync", rate("syncs")],
    ["make, remove, rename", rate("names")], ["other", otherRequests],
  ]],
  ["Throughput", bytesPerSecond, [
    ["read", rate("read_bytes")], ["written", rate("written_bytes")], ["log", rate("log_bytes")],
    ["to the store", rate("put_bytes")], ["from the store", rate("get_bytes")],
  ]],
  ["Made durable", perSecond, [
    ["syncs", rate("forces")], ["commits", rate("commits")], ["flushes", rate("flushes")],
    ["transactions", rate("transactions")],
  ]],
  ["Time, on average", nanos, [["commit, as a sync waits", commitTime], ["flush of the device", gauge("flush_ns")]]],
  ["Log in use", percent, [["of the log", logFill]], 100],
  ["Waiters", whole, [
    ["changes, for the log", gauge("log_waiters")], ["parked requests", gauge("parked")],
    ["changes, for the server", gauge("unanswered")],
  ]],
  ["Cache", bytes, [["contents", gauge("cache")], ["not on the device yet", gauge("dirty")]]],
  ["Space", bytes, [["used", gauge("used")]]],
];

/// Courses of some figures over the last hour. The arrow keys and the pointer choose a time.
class Chart {
  constructor([title, format, lines, top]) {
    Object.assign(this, { title, format, top, chosen: null });
    this.lines = lines.map(([name, value], index) => {
      const path = svg("path", { class: `c${index}` });
      const number = el("b");
      const item = el("li", {}, el("i", { class: `c${index}` }), `${name} `, number);
      return { name, value, path, number, item, points: [] };
    });
    this.cursor = svg("line", { y1: 0, y2: HEIGHT });
    this.picture = svg("svg", {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", tabindex: 0, role: "img",
    }, ...this.lines.map((line) => line.path), this.cursor);
    this.most = el("span");
    this.from = el("span");
    this.to = el("span");
    this.node = el("figure", {},
      el("div", { class: "axis" }, el("h3", {}, title), this.most),
      this.picture,
      el("div", { class: "axis" }, this.from, this.to),
      el("ul", { class: "legend" }, ...this.lines.map((line) => line.item)));
    this.picture.addEventListener("pointermove", (event) => {
      const box = this.picture.getBoundingClientRect();
      this.choose(this.start + ((event.clientX - box.left) / box.width) * this.span);
    });
    this.picture.addEventListener("pointerleave", () => this.choose(null));
    this.picture.addEventListener("blur", () => this.choose(null));
    this.picture.addEventListener("keydown", (event) => this.key(event));
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step && this.times.length) {
      const at = this.chosen === null ? this.times.length : this.nearest();
      const next = Math.min(Math.max(at + step, 0), this.times.length - 1);
      this.choose(this.times[next]);
      event.preventDefault();
    } else if (event.key === "Escape") {
      this.choose(null);
    }
  }

  nearest() {
    const distance = (at) => Math.abs(this.times[at] - this.chosen);
    return this.times.reduce((best, _, at) => (distance(at) < distance(best) ? at : best), 0);
  }

  choose(time) {
    this.chosen = time;
    this.tell();
  }

  update(samples, figures, start, end) {
    Object.assign(this, { start, end, span: end - start, times: samples.map((one) => one.time) });
    let most = 0;
    for (const line of this.lines) {
      line.points = samples.map((one, at) => line.value(one, samples[at - 1], figures));
      most = Math.max(most, ...line.points.filter(known));
      line.item.hidden = !line.points.some(known);
    }
    this.node.hidden = this.lines.every((line) => line.item.hidden);
    this.most.textContent = this.top || most ? `top ${this.format(this.top || most)}` : "";
    const height = this.top || most * 1.05 || 1;
    for (const line of this.lines) line.path.setAttribute("d", this.course(line.points, height));
    this.from.textContent = `${seconds(this.span / 1000)} ago`;
    this.tell();
  }

  course(points, height) {
    let course = "";
    let draws = false;
    points.forEach((value, at) => {
      if (known(value)) {
        const x = ((this.times[at] - this.start) / this.span) * WIDTH;
        const y = HEIGHT - (value / height) * HEIGHT;
        const alone = !known(points[at - 1]) && !known(points[at + 1]);
        course += `${draws ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}${alone ? "h2" : ""}`;
      }
      draws = known(value);
    });
    return course;
  }

  /// Says the figures of the chosen time, or the newest ones.
  tell() {
    const at = this.chosen === null ? this.times.length - 1 : this.nearest();
    const said = [];
    for (const line of this.lines) {
      const value = line.points[at];
      line.number.textContent = known(value) ? this.format(value) : "–";
      if (!line.item.hidden) said.push(`${line.name} ${line.number.textContent}`);
    }
    const chosen = this.chosen !== null && at >= 0;
    const when = chosen ? `${seconds((this.end - this.times[at]) / 1000)} ago` : "now";
    this.to.textContent = when;
    this.picture.setAttribute("aria-label", `${this.title}, ${when}: ${said.join(", ")}`);
    const x = chosen ? ((this.times[at] - this.start) / this.span) * WIDTH : -10;
    this.cursor.setAttribute("x1", x);
    this.cursor.setAttribute("x2", x);
  }
}

// What is said beside the charts.

/// With less available, a volume is called nearly full, as by the alert.
const NEARLY_FULL = 0.05;

/// A share that is drawn as a bar.
const share = (used, all) => ({ used, all });

function* facts(figures) {
  const { space, log, data, memory, flush, scrub, store, replica, server, connection } = figures;
  const volume = figures.volume || {};
  if (volume.failed) yield ["Has failed", volume.failed, "bad"];
  if (store && store.held && store.held.reason) yield ["The store", store.held.reason, "bad"];
  if (connection) {
    const word = connection.connected ? "connected" : "away";
    yield ["Its server", word, connection.connected ? "" : "bad"];
    if (connection.lost_changes) yield ["Lost changes", whole(connection.lost_changes), "bad"];
  }
  if (space && space.total) {
    const scarce = space.available < NEARLY_FULL * space.total;
    const free = `${bytes(space.available)} available of ${bytes(space.total)}${scarce ? ": nearly full" : ""}`;
    yield ["Space", free, scarce ? "bad" : "", share(space.total - space.available, space.total)];
  }
  if (log && log.bytes) {
    const used = log.bytes - log.free_bytes;
    const waits = log.waiters ? `, ${whole(log.waiters)} wait` : "";
    const text = `${bytes(used)} of ${bytes(log.bytes)} in use${waits}`;
    yield ["Log", text, log.waiters ? "bad" : "", share(used, log.bytes)];
  }
  if (data && known(data.cache_bytes)) {
    const text = `${bytes(data.cache_bytes)} of ${bytes(data.cache_limit_bytes)}, ` +
      `${bytes(data.dirty_bytes)} not on the device yet`;
    yield ["Cache", text, "", share(data.cache_bytes, data.cache_limit_bytes)];
  }
  if (memory) yield ["Memory", `${bytes(memory.used_bytes)} of ${bytes(memory.limit_bytes)}`];
  if (flush) yield ["Flush of the device", nanos(flush.avg_flush_ns)];
  if (scrub) {
    const bad = scrub.damaged_blocks ? `, ${whole(scrub.damaged_blocks)} damaged blocks` : "";
    const since = scrub.started ? `, begun ${scrub.started.replace("T", " ").replace("Z", " UTC")}` : "";
    yield ["Scrub", `${scrub.state}${bad}${since}`, bad ? "bad" : ""];
  }
  if (data && data.damaged_blocks) yield ["Damaged when read", whole(data.damaged_blocks), "bad"];
  if (store && known(store.live_bytes)) yield ["In the store", bytes(store.live_bytes)];
  if (store && known(store.unsent_bytes)) yield ["Not in the store yet", bytes(store.unsent_bytes)];
  if (replica && known(replica.behind_ns)) yield ["Replica is behind", nanos(replica.behind_ns)];
  if (server && known(server.leases)) {
    yield ["Leases", `${whole(server.leases)}, ${whole(server.write_leases)} to write`];
  }
  const until = (server || connection || {}).certificate_until_secs;
  if (known(until)) {
    const left = until - Date.now() / 1000;
    const day = new Date(until * 1000).toISOString().slice(0, 10);
    yield ["Certificate", `until ${day}`, left < 30 * 86400 ? "bad" : ""];
  }
  if (figures.inodes) {
    yield ["Files", `${whole(figures.inodes.used)}, ${whole(figures.inodes.open_files)} open`];
  }
}

/// Who waits for what: the waiter, what it waits for, how many, since when.
function* waits(figures, clients) {
  const { log, fuse, store, connection } = figures;
  if (log && log.waiters) yield ["changes", "space in the log", whole(log.waiters), ""];
  if (fuse && fuse.parked) yield ["requests", "a lock, a client or the device", whole(fuse.parked), ""];
  if (store && store.held) {
    const { requests, time_ns, reason } = store.held;
    yield ["requests", `the store: ${reason}`, whole(requests), nanos(time_ns)];
  }
  if (store && store.waiting_objects) {
    yield ["objects in the local log", "the store", whole(store.waiting_objects), nanos(store.waiting_oldest_ns)];
  }
  if (connection && connection.unanswered_changes) {
    const since = seconds(connection.unanswered_ms / 1000);
    yield ["changes", "the server's answer", whole(connection.unanswered_changes), since];
  }
  for (const client of clients.filter((one) => one.unanswered)) {
    const since = known(client.oldest_ms) ? seconds(client.oldest_ms / 1000) : "";
    yield [`client ${client.name}`, "this server's answer", whole(client.unanswered), since];
  }
}

const OPERATIONS_MAX = 12;

/// The operations since the mount, the slowest on average first.
function* operations(figures) {
  const all = Object.entries((figures.fuse || {}).operations || {});
  const timed = all.filter(([, one]) => one.times && one.times.count);
  timed.sort(([, one], [, other]) => other.average_ns - one.average_ns);
  for (const [name, one] of timed.slice(0, OPERATIONS_MAX)) {
    yield [name, whole(one.count), whole(one.errors), nanos(one.average_ns), within(one.times, 0.99), within(one.times, 1)];
  }
}

/// The time in which this share of the operations has ended. Each bucket counts those before, too.
function within(times, share) {
  const bucket = times.buckets.find(([, count]) => count >= times.count * share);
  return bucket ? `< ${nanos(bucket[0])}` : `> ${nanos(times.buckets[times.buckets.length - 1][0])}`;
}

function* components(figures) {
  for (const [path, one] of Object.entries(figures.devices || {})) {
    const state = ["active", "replaced"].includes(one.state) ? one.state : ["bad", one.state];
    const errors = one.read_errors + one.write_errors;
    const built = one.rebuild_bytes ? `${bytes(one.rebuilt_bytes)} of ${bytes(one.rebuild_bytes)}` : "";
    yield [path, state, errors ? ["bad", whole(errors)] : "0", whole(one.repairs), nanos(one.avg_flush_ns), built];
  }
}

function* sessions(clients) {
  for (const one of clients) {
    const state = one.connected ? "connected" : ["bad", "away"];
    const mode = one.read_only ? "read only" : "read and write";
    yield [one.name, one.certificate || "–", one.address || "–", one.path, state, mode,
      whole(one.leases), whole(one.unanswered)];
  }
}

/// A table that is there while it has lines. A cell is a text, or a class and a text.
class Table {
  constructor(title, heads) {
    this.body = el("tbody");
    const head = el("tr", {}, ...heads.map((text) => el("th", { scope: "col" }, text)));
    this.node = el("div", { class: "scroll" },
      el("table", {}, el("caption", {}, title), el("thead", {}, head), this.body));
  }

  update(lines) {
    const cell = (one) => (Array.isArray(one) ? el("td", { class: one[0] }, one[1]) : el("td", {}, one));
    const made = [...lines].map((line) => el("tr", {}, ...line.map(cell)));
    this.node.hidden = made.length === 0;
    this.body.replaceChildren(...made);
  }
}

// The map of space: which directories of a volume take how much.

/// Divides a box among these sizes, the largest first, so that no part is needlessly long:
/// squarified treemaps (Bruls, Huizing and van Wijk, 2000).
function squarify(sizes, { x, y, width, height }) {
  const scale = (width * height) / sizes.reduce((sum, one) => sum + one, 0);
  const parts = [];
  while (parts.length < sizes.length) {
    const side = Math.min(width, height);
    const first = parts.length;
    let end = first;
    let area = 0;
    let worst = Infinity;
    while (end < sizes.length) {
      const next = area + sizes[end] * scale;
      const length = (size) => (side * side * size * scale) / (next * next);
      const stretched = (size) => Math.max(length(size), 1 / length(size));
      const now = Math.max(stretched(sizes[first]), stretched(sizes[end]));
      if (now > worst) break;
      [worst, area, end] = [now, next, end + 1];
    }
    const thick = area / side;
    for (let offset = 0; parts.length < end; ) {
      const long = (sizes[parts.length] * scale) / thick;
      parts.push(width >= height
        ? { x, y: y + offset, width: thick, height: long }
        : { x: x + offset, y, width: long, height: thick });
      offset += long;
    }
    if (width >= height) [x, width] = [x + thick, width - thick];
    else [y, height] = [y + thick, height - thick];
  }
  return parts;
}

const LABEL = 20;
const count = (value, one, many) => `${whole(value)} ${value === 1 ? one : many}`;

/// What a directory consists of, the largest first: directories, its own files, and the rest.
function contents(dir) {
  const items = dir.largest.map((one) => ({ ...one, dir: one }));
  if (dir.own.files) items.push({ ...dir.own, directories: 0, name: "files in it", kind: "own" });
  if (dir.others.directories) items.push({ ...dir.others, name: "other directories", kind: "others" });
  return items.sort((one, other) => other.bytes - one.bytes);
}

class SpaceMap {
  constructor() {
    this.begin = el("button", { type: "button" }, "Map of space");
    this.cancel = el("button", { type: "button" }, "Stop");
    this.progress = el("progress", { "aria-label": "counted" });
    this.said = el("span", { role: "status" });
    this.path = el("nav", { class: "path", "aria-label": "Directory" });
    this.tiles = el("div", { class: "map", role: "group" });
    this.table = new Table("Directories", ["name", "space", "share", "files", "directories"]);
    this.found = el("div", {}, this.path, this.tiles,
      el("p", { class: "about" }, "Arrow keys choose, Enter opens a directory, Backspace leaves it."), this.table.node);
    this.node = el("section", { class: "space", "aria-label": "Space by directory" },
      el("p", {}, this.begin, " ", this.cancel, " ", this.progress, " ", this.said), this.found);
    this.begin.addEventListener("click", () => this.load(this.way.length === 0 && !this.asked ? "" : "begin"));
    this.cancel.addEventListener("click", () => this.ask("stop"));
    this.node.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(this.tiles);
    this.number = null;
    this.reset();
  }

  reset() {
    Object.assign(this, { way: [], asked: false, width: 0 });
    this.say({ state: "none" });
  }

  update(source, offered) {
    const figures = source.figures || {};
    this.node.hidden = !offered || !figures.space || Boolean(figures.connection || figures.replica);
    if (source.number !== this.number) this.reset();
    this.number = source.number;
  }

  ask(order) {
    return get(`map.json?source=${this.number}`, order ? { "Ferry-Map": order } : {});
  }

  /// What is there already is drawn at once. Otherwise it is counted.
  async load(order) {
    this.asked = true;
    const number = this.number;
    try {
      let answer = await this.ask(order);
      if (answer.state === "none" && order !== "begin") answer = await this.ask("begin");
      while (answer.state === "running" && number === this.number) {
        this.say(answer);
        await new Promise((resolve) => setTimeout(resolve, 500));
        answer = await this.ask("");
      }
      if (number === this.number) this.say(answer);
    } catch (error) {
      this.say({ state: "failed", why: error.message });
    }
  }

  say(answer) {
    const running = answer.state === "running";
    const had = [this.begin, this.cancel].includes(document.activeElement);
    this.begin.hidden = running;
    this.cancel.hidden = this.progress.hidden = !running;
    this.found.hidden = answer.state !== "complete";
    this.begin.textContent = answer.state === "complete" ? "Count again" : "Map of space";
    this.said.className = answer.state === "failed" ? "state bad" : "about";
    this.said.textContent = "";
    if (running) {
      this.progress.max = Math.max(answer.of, answer.counted, 1);
      this.progress.value = answer.counted;
      this.said.textContent = `${whole(answer.counted)} of ${whole(answer.of)} files and directories`;
    } else if (answer.state === "failed") {
      this.said.textContent = answer.why;
    } else if (answer.state === "complete") {
      const { tree, time_ns: time, wall_secs: when, missed } = answer.map;
      const rest = missed ? `, ${whole(missed)} changed meanwhile or could not be read` : "";
      this.said.textContent =
        `counted ${new Date(when * 1000).toLocaleTimeString()} in ${nanos(time)}${rest}`;
      this.way = [tree];
      this.draw(true);
    }
    // A button that had the focus may be hidden now.
    if (had && this.found.hidden) (running ? this.cancel : this.begin).focus();
    else if (had) this.focus(0);
  }

  open(dir) {
    this.way.push(dir);
    this.draw(true);
    this.focus(0);
  }

  /// Leaves directories until so many are left on the way.
  leave(depth) {
    const from = this.way[depth];
    if (!from || depth < 1) return;
    this.way.length = depth;
    this.draw(true);
    this.focus(Math.max(0, this.items.findIndex((item) => item.dir === from)));
  }

  key(event) {
    if (this.found.hidden) return;
    const at = [...this.tiles.children].indexOf(document.activeElement);
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (step && at >= 0) this.focus(Math.min(Math.max(at + step, 0), this.tiles.children.length - 1));
    else if (["Backspace", "Escape"].includes(event.key)) this.leave(this.way.length - 1);
    else return;
    event.preventDefault();
  }

  /// One of the tiles can be reached with Tab, from there the others with the arrow keys.
  focus(at) {
    [...this.tiles.children].forEach((tile, index) => (tile.tabIndex = index === at ? 0 : -1));
    if (this.tiles.children[at]) this.tiles.children[at].focus();
  }

  draw(again = false) {
    const { clientWidth: width, clientHeight: height } = this.tiles;
    if (!this.way.length || this.found.hidden || !width || (width === this.width && !again)) return;
    this.width = width;
    const dir = this.way[this.way.length - 1];
    this.items = contents(dir);
    const share = (item) => percent(dir.bytes ? (100 * item.bytes) / dir.bytes : 0);
    const inner = (item) => `${count(item.files, "file", "files")}, ${count(item.directories, "directory", "directories")}`;
    this.path.replaceChildren(...this.way.flatMap((one, at) => {
      const last = at === this.way.length - 1;
      const step = el("button", { type: "button", class: "link" }, one.name || "all of it");
      step.addEventListener("click", () => this.leave(at + 1));
      return [at ? " / " : "", last ? el("b", { "aria-current": "location" }, one.name || "all of it") : step];
    }), ` ${bytes(dir.bytes)}, ${inner(dir)}`);
    const drawn = this.items.filter((item) => item.bytes);
    const parts = squarify(drawn.map((item) => item.bytes), { x: 0, y: 0, width, height });
    const focus = [...this.tiles.children].findIndex((tile) => tile.tabIndex === 0);
    this.tiles.replaceChildren(...parts.map((part, at) => this.tile(drawn[at], at, part,
      `${drawn[at].name}: ${bytes(drawn[at].bytes)}, ${share(drawn[at])}, ${inner(drawn[at])}`)));
    const reached = this.tiles.children[again || focus < 0 ? 0 : focus];
    if (reached) reached.tabIndex = 0;
    this.tiles.setAttribute("aria-label", `Space in ${dir.name || "all of it"}, ${drawn.length} parts`);
    this.table.update(this.items.map((item) => [
      item.dir && item.dir.largest.length ? this.link(item) : item.name,
      bytes(item.bytes), share(item), whole(item.files), whole(item.directories)]));
  }

  link(item) {
    const link = el("button", { type: "button", class: "link" }, item.name);
    link.addEventListener("click", () => this.open(item.dir));
    return link;
  }

  tile(item, at, { x, y, width, height }, label) {
    const opens = item.dir && item.dir.largest.length;
    const tile = el("button", { type: "button", class: item.kind || `m${at % 4}`, "aria-label": label, title: label, tabindex: -1 });
    spread(tile, { x, y, width, height });
    if (width > 2 * LABEL && height > LABEL) {
      tile.append(el("span", { class: "name" }, item.name));
      const roomy = height > 2 * LABEL;
      if (roomy) tile.append(el("span", { class: "name" }, bytes(item.bytes)));
      if (opens && roomy) this.inside(tile, item.dir, width - 6, height - 2 * LABEL - 4);
    }
    if (opens) tile.addEventListener("click", () => this.open(item.dir));
    else tile.setAttribute("aria-disabled", "true");
    return tile;
  }

  /// The parts of a directory, without names.
  inside(tile, dir, width, height) {
    const sizes = contents(dir).map((item) => item.bytes).filter((size) => size);
    if (width < LABEL || height < LABEL || !sizes.length) return;
    for (const part of squarify(sizes, { x: 2, y: 2 * LABEL, width, height })) {
      if (part.width < 3 || part.height < 3) continue;
      const box = el("span", { class: "box", "aria-hidden": "true" });
      spread(box, part);
      tile.append(box);
    }
  }
}

function spread(node, { x, y, width, height }) {
  Object.assign(node.style, { left: `${x}px`, top: `${y}px`, width: `${width}px`, height: `${height}px` });
}

/// A mount or a server.
class Source {
  constructor(id) {
    this.samples = [];
    this.name = el("h2");
    this.state = el("span");
    this.about = el("p", { class: "about" });
    this.facts = el("dl", { class: "facts" });
    this.waits = new Table("Waits", ["who", "for what", "how many", "since"]);
    this.operations = new Table(`Requests of the kernel since the mount, the slowest ${OPERATIONS_MAX}`,
      ["operation", "how many", "errors", "average", "99 % of them", "all of them"]);
    this.components = new Table("Components", ["path", "state", "errors", "repairs", "flush", "rebuilt"]);
    this.clients = new Table("Clients",
      ["name", "certificate", "address", "path", "state", "mode", "leases", "unanswered"]);
    this.space = new SpaceMap();
    this.charts = CHARTS.map((chart) => new Chart(chart));
    this.node = el("article", { id },
      el("div", { class: "title" }, this.name, this.state), this.about, this.facts,
      this.waits.node, this.space.node, this.components.node, this.clients.node, this.operations.node,
      el("div", { class: "charts" }, ...this.charts.map((chart) => chart.node)));
    this.linkState = el("span");
    this.linkName = el("a", { href: `#${id}` });
    this.link = el("tr", {}, el("td", {}, this.linkState), el("td", {}, this.linkName), el("td"), el("td"));
    this.linkName.addEventListener("click", (event) => {
      // The fragment of the address has the token.
      event.preventDefault();
      this.node.scrollIntoView();
    });
  }

  update(source, columns, now, maps) {
    const figures = source.figures || {};
    for (const [time, ...values] of source.samples) {
      this.samples.push({ time, ...Object.fromEntries(columns.map((name, at) => [name, values[at]])) });
    }
    this.samples = this.samples.filter((one) => one.time > now - HOUR_MS);
    // Of a server that has never answered only the process is known.
    const name = source.at === "-" ? `${source.kind}, process ${source.process}` : source.at;
    this.name.textContent = name;
    for (const badge of [this.state, this.linkState]) {
      badge.textContent = source.state;
      badge.className = `state ${source.level}`;
    }
    this.node.className = source.level;
    const process = source.process ? `, process ${source.process}` : "";
    this.about.textContent = `${source.kind} of ${source.volume}${process}`;
    this.linkName.textContent = name;
    this.link.cells[2].textContent = source.kind;
    this.link.cells[3].textContent = this.activity();
    this.facts.replaceChildren(...[...facts(figures)].map(fact));
    this.waits.update(waits(figures, source.clients));
    this.space.update(source, maps);
    this.components.update(components(figures));
    this.operations.update(operations(figures));
    this.clients.update(sessions(source.clients));
    const oldest = this.samples.length ? this.samples[0].time : now;
    const start = now - Math.max(now - oldest, SPAN_MIN_MS);
    for (const chart of this.charts) chart.update(this.samples, figures, start, now);
  }

  cannotShow(error) {
    for (const badge of [this.state, this.linkState]) {
      badge.textContent = `its figures cannot be drawn: ${error.message}`;
      badge.className = "state bad";
    }
    this.node.className = "bad";
  }

  /// What it does now, in few words.
  activity() {
    const [before, now] = this.samples.slice(-2);
    const requests = now ? rate("requests")(now, before) : null;
    const changes = now ? rate("transactions")(now, before) : null;
    if (requests !== null) return `${digits(requests)} requests/s`;
    return changes !== null ? `${digits(changes)} transactions/s` : "";
  }
}

function fact([name, text, level, bar]) {
  const node = el("div", { class: level || "" }, el("dt", {}, name), el("dd", {}, text));
  if (bar && bar.all) {
    const meter = el("meter", { min: 0, max: 1, low: 0.8, high: 0.9, optimum: 0, "aria-label": name });
    meter.value = bar.used / bar.all;
    node.append(meter);
  }
  return node;
}

// The page.

let views = new Map();
let run = null;
let tick = 0;
/// When the newest figures were read, on the page's clock. Null: there are none.
let readAt = null;
let trouble = "";

function show(answer) {
  byId("host").textContent = `on ${answer.host}`;
  document.title = `FerryFS on ${answer.host}`;
  const next = new Map();
  for (const source of answer.sources) {
    const isServer = source.kind === "server" && known(source.process);
    let key = JSON.stringify(isServer ? source.process : [source.volume, source.at]);
    while (next.has(key)) key += "+";
    const view = views.get(key) || new Source(`source-${Math.random().toString(36).slice(2)}`);
    try {
      view.update(source, answer.columns, answer.now_ms, answer.maps);
    } catch (error) {
      // A daemon of another user may answer anything. The others are drawn.
      view.cannotShow(error);
    }
    next.set(key, view);
  }
  views = next;
  inOrder(byId("sources"), [...views.values()].map((view) => view.node));
  const count = (level) => answer.sources.filter((source) => source.level === level).length;
  const more = answer.left_out ? `, and ${answer.left_out} more that are not shown` : "";
  byId("summary").textContent = answer.sources.length
    ? `${count("bad")} bad, ${count("note")} to look at, ${count("ok")} fine${more}`
    : "nothing is mounted or served here that answers you";
  byId("overview").hidden = views.size < 2;
  inOrder(overview.tBodies[0], [...views.values()].map((view) => view.link));
}

/// Makes these the children. One that is there already is not moved: it may have the focus.
function inOrder(parent, nodes) {
  for (const child of [...parent.children]) if (!nodes.includes(child)) child.remove();
  nodes.forEach((node, at) => {
    if (parent.children[at] !== node) parent.insertBefore(node, parent.children[at] || null);
  });
}

const overview = el("table", {},
  el("thead", {}, el("tr", {},
    ...["state", "at", "kind", "now"].map((text) => el("th", { scope: "col" }, text)))),
  el("tbody"));
byId("overview").append(el("div", { class: "scroll" }, overview));

async function get(what, more = {}) {
  const headers = token ? { Authorization: `Bearer ${token}`, ...more } : more;
  const signal = AbortSignal.timeout(10000);
  const response = await fetch(what, { headers, signal });
  if (response.status === 401) {
    throw new Error("the token is wrong or absent. Open the address that ferry dashboard prints");
  }
  if (!response.ok) throw new Error(`${response.status} ${response.statusText}`);
  return response.json();
}

async function load() {
  const answer = await get(`data.json?since=${tick}`);
  if (run !== null && answer.run !== run) {
    // Another process answers: what this page has is not its own.
    views = new Map();
    [run, tick] = [null, 0];
    return load();
  }
  run = answer.run;
  if (answer.tick > tick) {
    tick = answer.tick;
    show(answer);
  }
  readAt = answer.tick ? performance.now() - answer.age_ms : null;
  return undefined;
}

async function refresh() {
  try {
    await load();
    trouble = "";
  } catch (error) {
    trouble = error.message;
  }
  tell();
  setTimeout(refresh, 2500);
}

/// Says how old the figures are.
function tell() {
  const age = readAt === null ? null : performance.now() - readAt;
  byId("fresh").textContent = age === null ? "" : `figures of ${Math.round(age / 1000)} s ago`;
  const old = age !== null && age > STALE_MS;
  const lines = [];
  if (old) lines.push(`These figures are ${seconds(age / 1000)} old: the daemons or ferry dashboard do not answer.`);
  if (trouble && (old || age === null)) lines.push(`No figures: ${trouble}.`);
  byId("warning").textContent = lines.join(" ");
  byId("warning").hidden = lines.length === 0;
}

setInterval(tell, 1000);
addEventListener("hashchange", () => location.reload());
refresh();
