"""The controller of Servings, each a version of a model behind one address. It reads no storage and no Secret."""
