// The search runs in a worker, which browsers refuse on pages that are opened from a disk: there an invisible frame
// stands in for it. The theme looks for the name `IFrameWorker`.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inner = frame.contentWindow;
      inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inner.importScripts = (...scripts) => Promise.all(scripts.map(load));
      this.ready = load(url);
      this.inner = inner;

      function load(src) {
        return new Promise((done, failed) => {
          const script = inner.document.createElement("script");
          Object.assign(script, { src, onload: done, onerror: failed });
          inner.document.body.append(script);
        });
      }
    }

    postMessage(data) {
      const send = () => this.inner.dispatchEvent(new MessageEvent("message", { data }));
      this.ready.then(send);
    }

    terminate() {
      this.inner.frameElement.remove();
    }
  };
}
