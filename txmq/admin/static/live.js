// Live parts, keys and filters of the console's pages.
//
// The server renders everything: what arrives is HTML whose texts it has escaped, and the content security policy
// runs no other scripts than the console's files. A live part stands still while its viewer scrolls, selects or types;
// the stream is closed then, so that the broker does no work for it.
"use strict";

(() => {
  const body = document.body;
  const root = body.dataset.root;
  const isLive = body.dataset.live === "yes";
  const part = () => document.getElementById("live"); // htmx may have put another one in its place
  const state = document.getElementById("live-state");
  const help = document.getElementById("help");
  const GO_MS = 1200; // to go after g

  let stream = null;
  let paused = false; // by the viewer's own key or click
  let failures = 0;

  const isField = (element) => Boolean(element && element.closest("input, select, textarea, [contenteditable]"));

  // Whether a viewer has filled something in: another rendering of the part would lose it.
  function isFilled(field) {
    if (field.type === "hidden") return false;
    if (field.type === "checkbox" || field.type === "radio") return field.checked !== field.defaultChecked;
    if (!field.options) return field.value !== field.defaultValue;
    const first = [...field.options].findIndex((option) => option.defaultSelected);
    return field.selectedIndex !== Math.max(0, first);
  }

  function reason() {
    if (paused) return "paused";
    if (document.hidden) return "hidden";
    if (scrollY > 8) return "paused: scrolled";
    const selection = getSelection();
    if (selection && !selection.isCollapsed && part().contains(selection.anchorNode)) return "paused: selected";
    const focused = document.activeElement;
    if (focused && focused !== body && part().contains(focused)) return "paused: in use";
    if (document.querySelector("#live details[open], dialog[open]")) return "paused: opened";
    if ([...part().querySelectorAll("input, textarea, select")].some(isFilled)) return "paused: filled in";
    return "";
  }

  function show(text, kind) {
    state.hidden = false;
    if (state.textContent !== text) state.textContent = text;
    state.className = "pill " + kind;
  }

  function close() {
    if (stream) stream.close();
    stream = null;
  }

  function open() {
    const query = location.search;
    stream = new EventSource(root + "live/" + body.dataset.path + query);
    stream.addEventListener("open", () => {
      failures = 0;
      update();
    });
    stream.addEventListener("part", (event) => {
      if (reason()) return update();
      part().innerHTML = event.data;
      if (window.htmx) window.htmx.process(part());
      part().dispatchEvent(new CustomEvent("txmq:updated", { bubbles: true }));
      show("live", "good");
    });
    stream.addEventListener("gone", () => {
      close();
      paused = true;
      show("gone: load the page again", "bad");
    });
    stream.addEventListener("error", () => {
      failures += 1;
      if (stream && stream.readyState === EventSource.CLOSED) {
        close();
        setTimeout(update, Math.min(30000, 2000 * failures)); // refused: too many live pages, or no broker
      }
      show("not connected", "bad");
    });
  }

  function update() {
    if (!isLive) return;
    const why = reason();
    if (why) {
      close();
      show(why, "warn");
    } else if (!stream) {
      open();
      show("connecting", "");
    } else if (stream.readyState === EventSource.OPEN) {
      show("live", "good");
    }
  }

  function toggle() {
    if (state.textContent.startsWith("gone")) return location.reload();
    const why = reason();
    if (why && !paused) {
      getSelection().removeAllRanges();
      if (document.activeElement) document.activeElement.blur();
      part().querySelectorAll("form").forEach((form) => form.reset());
      part().querySelectorAll("details[open]").forEach((one) => (one.open = false));
      scrollTo({ top: 0 });
    } else {
      paused = !paused;
    }
    update();
  }

  if (isLive) {
    for (const name of ["scroll", "visibilitychange", "selectionchange", "focusin", "focusout", "toggle", "input"]) {
      document.addEventListener(name, () => setTimeout(update, 0), { passive: true, capture: true });
    }
    document.addEventListener("htmx:pushedIntoHistory", () => {
      close();
      update();
    });
    state.addEventListener("click", toggle);
    addEventListener("pagehide", close);
    addEventListener("pageshow", update);
    update();
  }

  // Keys.
  let goes = 0;

  function rows() {
    return [...document.querySelectorAll("main tbody tr")].filter((row) => row.querySelector("a[href]"));
  }

  function step(by) {
    const all = rows();
    const now = all.findIndex((row) => row.contains(document.activeElement));
    const next = all[Math.max(0, Math.min(all.length - 1, now < 0 ? 0 : now + by))];
    if (next) next.querySelector("a[href]").focus();
  }

  const KEYS = {
    "/": () => {
      const filter = document.querySelector("main [data-filter], main input[type=search]");
      if (filter) filter.focus();
    },
    "?": () => help.showModal(),
    p: toggle,
    j: () => step(1),
    k: () => step(-1),
  };

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
    if (event.key === "Escape" && isField(event.target)) return event.target.blur();
    if (isField(event.target) || document.querySelector("dialog[open]")) return;
    if (goes && performance.now() - goes < GO_MS) {
      goes = 0;
      const target = [...document.querySelectorAll("nav a[data-key]")].find((one) => one.dataset.key === event.key);
      if (target) {
        event.preventDefault();
        target.click();
        return;
      }
    }
    goes = event.key === "g" ? performance.now() : 0;
    const act = KEYS[event.key];
    if (act) {
      event.preventDefault();
      act();
    }
  });
  document.getElementById("open-help").addEventListener("click", () => help.showModal());

  // A command in an empty state is copied by a click.
  document.addEventListener("click", (event) => {
    const command = event.target.closest && event.target.closest("code.command");
    if (command && navigator.clipboard) navigator.clipboard.writeText(command.textContent).catch(() => {});
  });
})();
