// The transactions page: lists of transactions, or one transaction where the address has a token after its #.
"use strict";

const MESSAGES_SHOWN = 100;
const LISTS = {
  doubt: ["in-doubt", "No transaction is in doubt."],
  undecided: ["undecided", "No undecided transactions."],
  waiting: ["waiting", "No transaction waits."],
  open: ["open", "No transaction is incomplete."],
};

const conflicts = (now) => [
  text("When", (row) => age(now, row.at) + " ago"),
  text("Refused", (row) => row.asked, "bad"),
  text("By", (row) => row.by),
  text("Reason", (row) => row.reason, "long"),
];

const TOKEN = text("Token", (row) => (row.token ? link(row.token, "#" + encodeURIComponent(row.token)) : ""), "code");

const neighbours = (now) => [
  text("Age", (row) => (row.stored_at ? age(now, row.stored_at) : "")),
  text("State", (row) => (row.token ? row.state : "plain send"), "warn"),
  text("Service", (row) => row.service),
  count("Keys in common", "keys"),
  TOKEN,
];

const MESSAGES = [
  text("Place", (row) => `${row.topic}/${row.partition}/${row.offset ?? "?"}`, "code"),
  text("Key", (row) => row.key ?? ""),
  text("Tag", (row) => row.tag ?? ""),
  text("Headers", (row) => Object.entries(row.headers).map((pair) => pair.join("=")).join(", "), "long"),
  text("Size", (row) => bytes(row.size), "number"),
  text("Message", (row) => row.message_id, "code"),
];

function drawOne(one, now) {
  const since = (time) => (time ? age(now, time) + " ago" : "-");
  drawPairs("one-facts", [
    ["Token", one.token, "code"],
    ["State", one.in_doubt && !one.decided_at ? "in doubt" : one.state, one.decided_at ? "" : "warn"],
    ["Decider", one.decider.join(" "), ""],
    ["Service", one.service || "-", ""],
    ["Stored", since(one.stored_at), ""],
    ["Decided", since(one.decided_at), ""],
    ["By", one.by || "-", ""],
    ["Reason", one.reason || "-", ""],
    ["Check-backs", number(one.tries), ""],
    ["Last answer", one.check_reason || "-", one.check_reason ? "warn" : ""],
    ["Participants", one.participants.map((each) => each.join(" ")).join(", ") || "-", ""],
    ["Messages", number(one.messages), ""],
  ]);
  draw("one-before", one.waits_for, neighbours(now), "It waits for no transaction.");
  draw("one-behind", one.holds_up, neighbours(now), "It holds up no transaction.");
  draw("one-conflicts", one.conflicts, conflicts(now), "No decision was refused.");
  draw("one-messages", one.rows, MESSAGES, "It holds no messages.");
  const more = one.messages - one.rows.length;
  if (more > 0) element("one-messages").append(make("p", `and ${number(more)} more: txmq tx show`, "note"));
}

async function refreshOne(token) {
  const { value, now } = await get(`transactions/${encodeURIComponent(token)}?limit=${MESSAGES_SHOWN}`);
  drawOne(value, now);
}

async function refreshLists() {
  for (const [id, [state, nothing]] of Object.entries(LISTS)) {
    const { value, now } = await get(`transactions?state=${state}&limit=${ROWS_SHOWN}`);
    draw(id, value.transactions, transactions(now), nothing);
  }
  const { value, now } = await get(`transactions?state=conflicts&limit=${ROWS_SHOWN}`);
  draw("conflicts", value.transactions, [...conflicts(now), TOKEN], "No decision was refused.");
}

async function refresh() {
  const token = decodeURIComponent(location.hash.slice(1));
  element("one").hidden = !token;
  element("lists").hidden = Boolean(token);
  await (token ? refreshOne(token) : refreshLists());
}

addEventListener("hashchange", () => refresh().catch((error) => showStatus("cannot refresh: " + error.message, "bad")));
refreshForever(refresh);
