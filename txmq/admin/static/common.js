// Shared by the pages of the console: requests every two seconds, and tables of the replies.
//
// Names, reasons and errors come from clients. They become text (textContent), never markup, and the content security
// policy of the pages allows no other scripts than these files.
"use strict";

const EVERY_MS = 2000;
const TIMEOUT_MS = 10000;
const ROWS_SHOWN = 200;

const element = (id) => document.getElementById(id);

function make(tag, text, kind) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = String(text);
  if (kind) made.className = kind;
  return made;
}

async function get(path) {
  const response = await fetch("/api/v1/" + path, { signal: AbortSignal.timeout(TIMEOUT_MS) });
  const value = await response.json();
  if (!response.ok) throw new Error(value.message);
  return { value, now: Date.parse(response.headers.get("Date")) * 1000 };
}

function number(value) {
  return Number(value).toLocaleString("en");
}

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; value >= 1024 && unit < units.length - 1; unit += 1) value /= 1024;
  return `${unit ? value.toFixed(1) : value} ${units[unit]}`;
}

function age(now, then) {
  const seconds = Math.max(0, Math.round((now - then) / 1e6));
  if (seconds < 120) return `${seconds} s`;
  if (seconds < 7200) return `${Math.floor(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.floor(seconds / 3600)} h` : `${Math.floor(seconds / 86400)} d`;
}

// A column: its title, the text for a row, and its class, which may depend on the row.
const text = (title, show, kind = "") => ({ title, show, kind });
const count = (title, field, alarm = "") => ({
  title,
  show: (row) => number(row[field]),
  kind: (row) => "number " + (row[field] > 0 ? alarm : ""),
  head: "number",
});

function draw(id, rows, columns, nothing) {
  const place = element(id);
  if (!rows.length) {
    place.replaceChildren(make("p", nothing, "empty"));
    return;
  }
  const table = make("table");
  const head = table.createTHead().insertRow();
  for (const column of columns) head.append(make("th", column.title, column.head));
  const body = table.createTBody();
  for (const row of rows.slice(0, ROWS_SHOWN)) {
    const line = body.insertRow();
    for (const { show, kind } of columns) {
      const shown = show(row);
      const cell = make("td", shown instanceof Node ? undefined : shown, typeof kind === "function" ? kind(row) : kind);
      if (shown instanceof Node) cell.append(shown);
      line.append(cell);
    }
  }
  place.replaceChildren(table);
  if (rows.length > ROWS_SHOWN) place.append(make("p", `and ${number(rows.length - ROWS_SHOWN)} more`, "note"));
}

function drawPairs(id, pairs) {
  element(id).replaceChildren(
    ...pairs.map(([name, value, kind]) => {
      const fact = make("div");
      fact.title = value;
      fact.append(make("dt", name), make("dd", value, kind));
      return fact;
    }),
  );
}

function link(text, target) {
  const made = make("a", text);
  made.href = target;
  return made;
}

const ALARMS = (now) => [
  text("Alarm", (row) => row.name, (row) => (row.severity === "critical" ? "bad" : "warn")),
  text("For", (row) => age(now, row.since), "short"),
  text("Condition", (row) => row.text, "long"),
  text("Action", (row) => row.action, "long"),
];

async function refreshAlarms() {
  const { value, now } = await get("alarms");
  element("raised").hidden = !value.alarms.length;
  draw("alarms", value.alarms, ALARMS(now), "No alarms.");
}

// A list of transactions with links to their pages.
const transactions = (now) => [
  text("Age", (row) => age(now, row.stored_at), "short"),
  text("State", (row) => (row.in_doubt ? "in doubt" : row.state), (row) => (row.in_doubt ? "bad" : "warn")),
  text("Service", (row) => row.service),
  text("Decided by", (row) => row.decider[0]),
  count("Messages", "messages"),
  text("Keys", (row) => (row.keys === null ? "many" : number(row.keys)), "number"),
  count("Check-backs", "tries"),
  text("Last answer", (row) => row.check_reason, "long"),
  text("Token", (row) => link(row.token, "/transactions#" + encodeURIComponent(row.token)), "code"),
];

function showStatus(message, kind) {
  element("status").textContent = message;
  element("status").className = kind;
}

async function refreshForever(refresh) {
  if (!document.hidden) {
    try {
      await Promise.all([refreshAlarms(), refresh()]);
      showStatus("live, updated at " + new Date().toLocaleTimeString(), "");
    } catch (error) {
      showStatus("cannot refresh: " + error.message, "bad");
    }
  }
  setTimeout(refreshForever, EVERY_MS, refresh);
}
