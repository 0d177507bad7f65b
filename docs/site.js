// Wide tables and code can be scrolled with the keyboard.
const reachable = () => document.querySelectorAll(".md-typeset__scrollwrap").forEach((box) => (box.tabIndex = 0));
document.addEventListener("DOMContentLoaded", reachable);
