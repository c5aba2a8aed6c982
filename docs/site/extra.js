// What the theme makes while a page loads, named for those who hear it and for those who use no mouse.
function name() {
  document.querySelectorAll("nav.md-code__nav").forEach(nav => nav.setAttribute("role", "presentation"));
  document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset pre").forEach(box => {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
  });
}
new MutationObserver(name).observe(document.body, {childList: true, subtree: true});
window.addEventListener("resize", name);
name();
