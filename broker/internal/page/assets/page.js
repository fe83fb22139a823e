// Follows the broker: an event says that there is something new, and this gets the document again and
// replaces what is in #live. Without scripts, a reload does the same.
(() => {
  'use strict';
  const line = document.getElementById('connection');
  const pause = document.getElementById('pause');
  const live = document.getElementById('live');
  const silence = 25000, retryAfter = 3000;
  let source = null, watchdog = 0, retry = 0, held = 0, running = false, again = false, paused = false;

  const say = (text, isLost) => {
    if (line.textContent !== text) line.textContent = text;
    line.classList.toggle('lost', isLost);
  };
  const shownAt = () => document.getElementById('time').textContent;

  const fail = () => {
    if (!paused) say('✗ Connection lost. These are the figures of ' + shownAt() + '. Trying again …', true);
  };
  const work = () => {
    if (!paused) say('● Live', false);
  };

  // What has the focus keeps it, by its id.
  const replace = (fresh) => {
    const focused = live.contains(document.activeElement) ? document.activeElement : null;
    const regions = [...live.querySelectorAll('.scroll')];
    const region = regions.indexOf(focused), scrolled = regions.map((r) => r.scrollLeft);
    live.replaceChildren(...fresh.childNodes);
    const now = [...live.querySelectorAll('.scroll')];
    now.forEach((r, i) => { r.scrollLeft = scrolled[i] || 0; });
    const next = focused && focused.id ? document.getElementById(focused.id) : now[region];
    if (next) next.focus({ preventScroll: true });
  };
  // What is being selected or pressed stays until it is not any more: a click on what was replaced would be lost.
  const inHand = () => {
    const selection = document.getSelection();
    const is = live.matches(':active') || (!selection.isCollapsed && live.contains(selection.anchorNode));
    if (is) {
      say('Waits while text is selected or something is pressed. These are the figures of ' + shownAt() + '.', false);
      clearTimeout(held);
      held = setTimeout(refresh, 200);
    }
    return is;
  };

  const refresh = async () => {
    if (paused || inHand()) return;
    if (running) { again = true; return; }
    running = true;
    try {
      const response = await fetch(location.href, { redirect: 'manual', cache: 'no-store', signal: AbortSignal.timeout(15000) });
      if (response.type === 'opaqueredirect' || response.status === 401) { location.reload(); return; }
      if (response.status >= 500 || response.status === 429) throw new Error(String(response.status));
      const fresh = new DOMParser().parseFromString(await response.text(), 'text/html').getElementById('live');
      if (!fresh.querySelector('#time')) { location.reload(); return; }
      if (paused || inHand()) return;
      replace(fresh);
      work();
    } catch (error) {
      fail();
    } finally {
      running = false;
      if (again) { again = false; setTimeout(refresh, 1000); }
    }
  };

  const disconnect = () => {
    clearTimeout(watchdog);
    clearTimeout(retry);
    if (source) source.close();
    source = null;
  };
  const later = () => {
    disconnect();
    fail();
    retry = setTimeout(connect, retryAfter);
  };
  const connect = () => {
    disconnect();
    source = new EventSource('/events');
    const heard = () => {
      clearTimeout(watchdog);
      watchdog = setTimeout(later, silence);
    };
    heard();
    source.onmessage = () => { heard(); refresh(); };
    source.onerror = async () => {
      later();
      // Who is signed out signs in again.
      try {
        const response = await fetch('/events', { method: 'HEAD', cache: 'no-store' });
        if (response.status === 401) location.reload();
      } catch (error) { /* the broker is away */ }
    };
  };

  pause.hidden = false;
  pause.addEventListener('click', () => {
    paused = !paused;
    pause.setAttribute('aria-pressed', String(paused));
    pause.textContent = paused ? 'Go on' : 'Pause';
    if (paused) { disconnect(); say('Paused. These are the figures of ' + shownAt() + '.', false); } else { say('Connecting …', false); connect(); }
  });
  // A hidden tab needs no connection, of which browsers open six to one host.
  document.addEventListener('visibilitychange', () => {
    if (paused) return;
    if (document.hidden) disconnect(); else connect();
  });
  say('Connecting …', false);
  if (!document.hidden) connect();
})();
