"""Shows people how a promise broke: as text, as a Mermaid diagram, as a page to step through."""
