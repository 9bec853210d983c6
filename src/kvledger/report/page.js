// The page is complete without this script; it adds the selection of a round. It draws a round from the data block of
// its section, the way round_panel.py drew the first one. Text goes in as text only, never as markup: names are hostile.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const DASH = "\u2013";

function make(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(properties)) {
    if (value) node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

function shape(tag, attributes) {
  const node = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  return node;
}

function figure(value) {
  if (value === null) return DASH;
  if (value === true) return "yes";
  return value === false ? "no" : String(value);
}

class Section {
  constructor(root) {
    this.root = root;
    this.data = JSON.parse(root.querySelector("script.data").textContent);
    this.slider = root.querySelector("[data-part=slider]");
    if (!this.slider) return; // a trace without rounds
    this.slider.style.setProperty("--columns", this.data.rounds.length);
    for (const timeline of root.querySelectorAll(".timeline")) {
      const mark = make("div", { class: "mark" });
      mark.style.setProperty("--columns", timeline.dataset.count);
      timeline.append(mark);
    }
    this.slider.addEventListener("input", () => this.select(Number(this.slider.value)));
    root.addEventListener("click", (event) => this.clicked(event));
    this.select(this.data.first);
  }

  clicked(event) {
    const button = event.target.closest("button");
    if (button?.dataset.round) {
      this.select(Number(button.dataset.round));
      this.part("number").scrollIntoView({ block: "center" });
    } else if (button?.dataset.go) {
      this.select(this.selected + Number(button.dataset.go));
    } else {
      const track = event.target.closest(".track");
      if (track) this.select(this.roundAt(event, track));
    }
  }

  roundAt(event, track) {
    const { first, count } = track.closest(".timeline").dataset;
    const box = track.getBoundingClientRect();
    return Number(first) + Math.floor((count * (event.clientX - box.left)) / box.width);
  }

  part(name) {
    return this.root.querySelector(`[data-part=${name}]`);
  }

  select(index) {
    const last = this.data.rounds.length - 1;
    index = Math.min(Math.max(index, 0), last);
    if (index === this.selected) return;
    const first = this.selected === undefined;
    this.selected = index;
    const round = this.data.rounds[index];
    this.slider.value = index;
    this.slider.setAttribute("aria-valuetext", `round ${round.n} of ${this.data.rounds[last].n}`);
    for (const mark of this.root.querySelectorAll(".mark")) {
      const { first, count } = mark.parentElement.dataset;
      const column = index - Number(first);
      mark.style.setProperty("--column", column / count);
      mark.hidden = column < 0 || column >= Number(count);
    }
    for (const node of this.root.querySelectorAll("[data-part=number]")) node.textContent = round.n;
    for (const node of this.root.querySelectorAll("[data-f]")) {
      node.textContent = figure(round.f[this.data.keys.indexOf(node.dataset.f)]);
    }
    this.part("messages").replaceChildren(
      ...round.m.map(([kind, words]) => make("li", { class: kind }, ...this.words(words))),
    );
    this.part("waterfall")?.replaceChildren(...this.waterfall(round.w));
    this.part("decisions").replaceChildren(...round.d.map((row) => this.decision(row)));
    if (!first) this.remember(round.n);
  }

  // the address of the selected round, to hand to a colleague; a sandbox may forbid it
  remember(number) {
    try {
      history.replaceState(null, "", `#${this.root.id}-round-${number}`);
    } catch {
      // the page works without
    }
  }

  name(place) {
    const [shown, all] = this.data.names[place];
    return make("bdi", { class: "name", title: all }, shown);
  }

  words(words) {
    return words.map((word) => (typeof word === "number" ? this.name(word) : word));
  }

  waterfall(rows) {
    const low = Math.min(0, ...rows.map((row) => row[4]));
    const high = Math.max(1, ...rows.map((row) => row[4] + Math.max(row[3], 0)));
    return rows.map(([kind, place, words, tokens, level, change]) => {
      const label = place < 0 ? [words] : [this.name(place), " ", words];
      if (kind === "missing") label.push(" ", make("strong", {}, "in no entry"));
      const start = kind === "figure" ? 0 : level + tokens;
      return make(
        "tr",
        { class: kind },
        make("th", { scope: "row" }, ...label),
        make("td", { class: "bar" }, this.bar(kind, start, level, low, high)),
        make("td", { class: "n" }, change),
        make("td", { class: "n" }, String(level)),
      );
    });
  }

  bar(kind, start, end, low, high) {
    const svg = shape("svg", { "aria-hidden": "true", width: "100%", height: 14 });
    const share = (tokens) => `${Number(((100 * tokens) / (high - low)).toFixed(3))}%`;
    const part = (name, lower, upper) => {
      if (upper > lower) {
        svg.append(shape("rect", { class: name, x: share(lower - low), width: share(upper - lower), y: 1, height: 12 }));
      }
    };
    part(kind, Math.max(0, Math.min(start, end)), Math.max(start, end));
    part("below", Math.min(start, end), Math.min(0, Math.max(start, end)));
    svg.append(shape("line", { class: "zero", x1: share(-low), x2: share(-low), y1: -6, y2: 20 }));
    return svg;
  }

  decision([place, kind, what, notes, ...ledger]) {
    return make(
      "tr",
      { class: kind },
      make("th", { scope: "row" }, this.name(place)),
      ...[kind, what, notes].map((text) => make("td", {}, text)),
      ...ledger.map((value) => make("td", { class: "n" }, figure(value))),
    );
  }
}

const sections = new Map();
for (const root of document.querySelectorAll("section.trace")) sections.set(root.id, new Section(root));

function followAddress() {
  const [, id, number] = /^#(trace-\d+)-round-(\d+)$/.exec(location.hash) ?? [];
  const section = sections.get(id);
  const index = section?.data.rounds.findIndex((round) => round.n === Number(number));
  if (index >= 0) {
    section.select(index);
    section.root.scrollIntoView();
  }
}
addEventListener("hashchange", followAddress);
followAddress();

document.querySelector("[data-part=theme]").addEventListener("click", () => {
  const chosen = document.documentElement.dataset.theme;
  const dark = chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "light" : "dark";
});

for (const button of document.querySelectorAll("[data-copy]")) {
  button.addEventListener("click", async () => {
    const source = document.getElementById(button.dataset.copy);
    const said = button.parentElement.querySelector("[data-part=copied]");
    try {
      await navigator.clipboard.writeText(source.textContent);
      said.textContent = "copied";
    } catch {
      // no clipboard here: select it, so that one key does it
      getSelection().selectAllChildren(source);
      said.textContent = "selected: copy it with Ctrl+C";
    }
  });
}

// what is folded is not printed: the requests and their figures are, the trace and long tables are not
addEventListener("beforeprint", () => {
  for (const fold of document.querySelectorAll("details.fold")) fold.open = true;
});

document.documentElement.classList.add("scripted");
