from html.parser import HTMLParser

VOID = ("meta", "img")


class Page(HTMLParser):
    """The elements of a page with their attributes, and its text; rejects incorrect nesting."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.elements, self.texts, self._open = [], [], []
        self.feed(text)
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.texts.append((self._open[-1] if self._open else "", data))

    def text(self, of=None):
        return "\n".join(data for tag, data in self.texts if of in (None, tag))

    def all(self, name):
        return [attributes for tag, attributes in self.elements if tag == name]

    def needs_nothing_else(self):
        assert not {"script", "link", "iframe", "object", "embed", "base", "form"} & {tag for tag, _ in self.elements}
        for tag, attributes in self.elements:
            assert not [name for name in attributes if name.startswith("on")], (tag, attributes)
            for name in ("src", "href"):
                where = attributes.get(name, "data:")
                assert where.startswith("data:") or (":" not in where and not where.startswith("/")), where
        assert "url(" not in self.text("style")
        assert "@import" not in self.text("style")
