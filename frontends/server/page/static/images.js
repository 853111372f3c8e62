// Images of a question: chosen from files, kept as data URLs, and sent with the question.
import { html } from "./vendor/htm-preact.js";
import { toast } from "./store.js";

const MAX_IMAGES = 4;
// A data URL takes a third more, and the server takes bodies of 32 MiB by default.
const MAX_BYTES = 5 * 2 ** 20;

const read = (file) =>
  new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });

async function add(files, images, change) {
  const found = [...images];
  for (const file of files) {
    if (found.length >= MAX_IMAGES) toast(`A question takes at most ${MAX_IMAGES} images here.`);
    else if (file.size > MAX_BYTES) toast(`${file.name} is larger than 5 MiB.`);
    else if (!file.type.startsWith("image/")) toast(`${file.name} is no image.`);
    else found.push(await read(file));
  }
  change(found.slice(0, MAX_IMAGES));
}

export function Thumbs({ images, onRemove }) {
  return html`<div class="thumbs">
    ${images.map(
      (url, i) =>
        html`<span class="thumb"
          ><img src=${url} alt=${`Image ${i + 1}`} />
          ${onRemove && html`<button type="button" aria-label=${`Remove image ${i + 1}`} onClick=${() => onRemove(i)}>×</button>`}</span
        >`,
    )}
  </div>`;
}

export function ImageField({ images, change }) {
  const choose = (event) => {
    add(event.target.files, images, change);
    event.target.value = "";
  };
  return html`<div class="images">
    <label class="btn small"
      >Add images<input class="hidden-file" type="file" accept="image/*" multiple onChange=${choose}
    /></label>
    ${images.length > 0 && html`<${Thumbs} images=${images} onRemove=${(i) => change(images.filter((_, j) => j !== i))} />`}
  </div>`;
}
