// Search in pages opened from a disk: a browser starts no worker there, so its script runs in a hidden frame. The script
// asks for the name IFrameWorker to learn where it is.
if (location.protocol === "file:")
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.body.appendChild(document.createElement("iframe"));
      frame.hidden = true;
      frame.title = "search";
      const inside = (this.inside = frame.contentWindow);
      inside.postMessage = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        this.onmessage?.(event);
      };
      const load = (src) =>
        new Promise((done, failed) => {
          const script = inside.document.createElement("script");
          Object.assign(script, { src, onload: done, onerror: failed });
          inside.document.head.append(script);
        });
      inside.importScripts = (...all) => all.reduce((last, src) => last.then(() => load(src)), Promise.resolve());
      this.ready = load(new URL(url, location.href).href);
    }
    postMessage(data) {
      this.ready.then(() => {
        const event = new MessageEvent("message", { data });
        this.inside.dispatchEvent(event);
        this.inside.onmessage?.(event);
      });
    }
    terminate() {
      this.inside.frameElement?.remove();
    }
  };
