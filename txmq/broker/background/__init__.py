"""Work that the broker begins itself, in short steps on the reactor's timers."""
