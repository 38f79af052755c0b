// The OpenAPI document as HTML: a panel for each route, with a table of the fields of its body.

function element(tag, { text, ...attributes } = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  made.append(...children);
  return made;
}

const nameOf = (ref) => ref.split("/").at(-1);

// A schema in a few words: "text or list of integers".
function typeText(schema) {
  if (schema.$ref) return nameOf(schema.$ref);
  const parts = schema.anyOf ?? schema.oneOf;
  if (parts) return parts.filter((part) => part.type !== "null").map(typeText).join(" or ");
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" or ");
  if (schema.type === "array") return `list of ${typeText(schema.items ?? {})}`;
  return schema.type ?? "any";
}

function fieldRows(schema) {
  const required = new Set(schema.required ?? []);
  return Object.entries(schema.properties ?? {}).map(([name, field]) =>
    element("tr", {}, element("td", {}, element("code", { text: name })),
      element("td", { text: typeText(field) }), element("td", { text: required.has(name) ? "yes" : "" })));
}

function fieldTable(schema) {
  const head = ["field", "type", "required"].map((text) => element("th", { text }));
  return element("table", {}, element("thead", {}, element("tr", {}, ...head)),
    element("tbody", {}, ...fieldRows(schema)));
}

// The schema of a body and those that it refers to, each once.
function schemasOf(body, all) {
  const found = new Map();
  const visit = (value) => {
    if (Array.isArray(value)) return value.forEach(visit);
    if (typeof value !== "object" || value === null) return;
    if (value.$ref && !found.has(nameOf(value.$ref))) {
      const schema = all[nameOf(value.$ref)];
      if (schema === undefined) return;
      found.set(nameOf(value.$ref), schema);
      visit(schema);
    } else Object.values(value).forEach(visit);
  };
  visit(body);
  return found;
}

function routePanel(path, method, route, all) {
  const id = `${method}-${path}`;
  const title = element("h2", { id }, element("code", { text: `${method.toUpperCase()} ${path}` }));
  const panel = element("section", { class: "panel", "aria-labelledby": id }, title,
    element("p", { class: "quiet", text: route.summary }));
  for (const [name, schema] of schemasOf(route.requestBody, all)) {
    panel.append(element("details", {}, element("summary", { text: name }), fieldTable(schema)));
  }
  const statuses = Object.entries(route.responses).map(([status, { description }]) => `${status} ${description}`);
  panel.append(element("p", { class: "quiet", text: statuses.join(" · ") }));
  return panel;
}

function show({ info, paths, components }) {
  document.querySelector("#about").textContent = `${info.title} ${info.version}, as /openapi.json describes it`;
  const panels = Object.entries(paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, route]) => routePanel(path, method, route, components.schemas)));
  document.querySelector("#routes").replaceChildren(...panels);
}

async function load() {
  const notice = document.querySelector("#notice"), form = document.querySelector("#key-form");
  try {
    show(await getJson("openapi.json"));
    notice.hidden = form.hidden = true;
  } catch (error) {
    form.hidden = !error.needsKey;
    notice.hidden = error.needsKey && !keyStore.get();
    notice.textContent = error.message;
  }
}

document.querySelector("#key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  keyStore.set(document.querySelector("#key").value);
  load();
});
load();
