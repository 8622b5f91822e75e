/* Pages that are opened from the disk may start no worker, and the search runs in one. Here it runs in a hidden frame. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      this.inside = frame.contentWindow;
      window.addEventListener("message", (event) => {
        if (event.source !== this.inside && event.data?.fromWorker !== url) return;
        const told = new MessageEvent("message", { data: event.data.data });
        this.dispatchEvent(told);
        this.onmessage?.(told);
      });
      const page = this.inside.document;
      page.open();
      page.write(
        "<script>" +
          "const above = parent; postMessage = (data) => above.postMessage({ fromWorker: " + JSON.stringify(url) + ", data }, '*');" +
          "importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise((done, failed) => {" +
          "const script = document.createElement('script'); script.src = url; script.onload = done; script.onerror = failed;" +
          "document.body.appendChild(script); })), Promise.resolve());" +
          "</scr" + "ipt><body><script src='" + url + "'></scr" + "ipt>"
      );
      page.close();
      this.ready = new Promise((done) => { this.inside.onload = done; });
    }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {}
  };
}
