// Forms that act: the reply is shown in a dialog above the page. Without this script the same forms load pages.
//
// What arrives is HTML that the server has rendered; the content security policy runs no script in it.
"use strict";

(() => {
  let dialog = null;
  let busy = false;

  function show(html) {
    if (!dialog) {
      dialog = document.createElement("dialog");
      dialog.id = "acting";
      dialog.addEventListener("close", () => {
        const outcome = dialog.querySelector(".outcome");
        dialog.remove();
        dialog = null;
        if (!outcome) return;
        if (outcome.dataset.leads) location.assign(outcome.dataset.leads); // what was made, or is left
        else location.reload();
      });
      document.body.append(dialog);
    }
    dialog.innerHTML = html;
    if (!dialog.open) dialog.showModal();
    const first = dialog.querySelector("[autofocus], button.main, a.leave");
    if (first) first.focus();
  }

  async function send(form, submitter) {
    const fields = new URLSearchParams(new FormData(form, submitter));
    const address = (submitter && submitter.getAttribute("formaction")) || form.getAttribute("action");
    const reply = await fetch(address, {
      method: "POST",
      body: fields,
      headers: { "X-Txmq-Part": "yes" },
      redirect: "error",
    });
    const type = reply.headers.get("Content-Type") || "";
    const text = await reply.text();
    if (type.startsWith("text/html")) return show(text);
    const problem = document.createElement("p");
    problem.className = "bad";
    problem.textContent = text.slice(0, 1000) || `the broker answered ${reply.status}`;
    show("");
    dialog.replaceChildren(problem);
  }

  document.addEventListener("submit", (event) => {
    const form = event.target;
    if (!form.matches("form.act")) return;
    event.preventDefault();
    if (busy) return;
    busy = true;
    send(form, event.submitter)
      .catch(() => show('<p class="bad">The broker was not reached. It may have acted: look before you repeat it.</p>'))
      .finally(() => (busy = false));
  });

  document.addEventListener("click", (event) => {
    const leave = event.target.closest && event.target.closest("dialog#acting a.leave");
    if (!leave) return;
    event.preventDefault();
    dialog.close();
  });

  // One box chooses all rows of the page.
  document.addEventListener("change", (event) => {
    const all = event.target;
    if (!all.matches || !all.matches("input[data-all]")) return;
    for (const one of all.closest("form, section").querySelectorAll(`input[name="${all.dataset.all}"]`)) one.checked = all.checked;
  });

  // Names in a filter are completed by the broker.
  function complete(field) {
    const list = document.getElementById(field.getAttribute("list"));
    let asked = 0;
    let timer = 0;
    async function ask() {
      asked += 1;
      const mine = asked;
      const query = new URLSearchParams({ filter: field.value, at: field.selectionStart, group: field.dataset.group || "" });
      const reply = await fetch(document.body.dataset.root + "complete/letters?" + query);
      if (!reply.ok || mine !== asked) return;
      const found = await reply.json();
      list.replaceChildren(
        ...found.offers.map((offer) => {
          const option = document.createElement("option");
          option.value = offer;
          return option;
        }),
      );
    }
    const soon = () => {
      clearTimeout(timer);
      timer = setTimeout(() => ask().catch(() => {}), 150);
    };
    field.addEventListener("input", soon);
    field.addEventListener("focus", soon);
  }

  document.querySelectorAll("input[data-complete]").forEach(complete);
})();
