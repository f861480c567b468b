#!/bin/sh
# Installs what some checks need from the system, where that is possible: as root, with apt-get. Elsewhere those checks
# are skipped by name.
command -v chromium >/dev/null || command -v google-chrome >/dev/null && exit 0
[ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || { echo "chromium is not here and only root can install it: page tests are skipped"; exit 0; }
echo "setting up: chromium, for the page tests"
{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium; } >/dev/null 2>&1 \
  || echo "chromium could not be installed: page tests are skipped"
exit 0
