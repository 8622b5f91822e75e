#!/bin/sh
# Installs a lock file into /opt/venv, each file by its hash. Run while the image is built:
#
#   install.sh REQUIREMENTS
#
# /wheels          a folder to install from, where one is given (PIP_NO_INDEX=1: from nowhere else)
# /run/secrets/ca  certificates of a proxy that opens TLS, where one is given; it is not kept
# /run/secrets/pip a pip.conf, where one is given: mirrors, and their passwords; it is not kept, and wins over arguments
# /var/cache/pip   a cache, where one is mounted; else nothing is cached, and so nothing stays in the layer
set -eu
# An empty argument is one that was not given; pip would read it as an empty setting.
for name in PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_NO_INDEX PIP_FIND_LINKS PIP_TRUSTED_HOST; do
    eval "value=\${$name:-}"
    [ -n "$value" ] || unset $name
    # An argument is kept in the image's history, for everybody who pulls it.
    for url in $value; do
        host=${url#*://}
        case ${host%%/*} in *@*)
            echo "error: $name holds a user or password, which would stay in the image: put it into a pip.conf, make image PIP_CONF=FILE" >&2
            exit 2 ;;
        esac
    done
done
# The +cpu builds of torch are on torch's own index, not on PyPI.
case $1 in *-cpu.txt) export PIP_EXTRA_INDEX_URL="${PIP_EXTRA_INDEX_URL:-https://download.pytorch.org/whl/cpu}" ;; esac
if [ -s /run/secrets/pip ]; then
    unset PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS PIP_TRUSTED_HOST
    export PIP_CONFIG_FILE=/run/secrets/pip
fi
[ ! -s /run/secrets/ca ] || export PIP_CERT=/run/secrets/ca
if [ -n "$(ls -A /wheels 2>/dev/null)" ]; then export PIP_FIND_LINKS=/wheels; fi
if [ -d /var/cache/pip ]; then export PIP_CACHE_DIR=/var/cache/pip; else export PIP_NO_CACHE_DIR=1; fi

python -m venv /opt/venv
/opt/venv/bin/pip install --disable-pip-version-check --only-binary :all: --require-hashes -r "$1"

# The project and a model of your own are found without PYTHONPATH, which is left to the user.
printf '/opt/lockstep\n/app\n' > "$(/opt/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/lockstep.pth"
rm -rf /tmp/* /root/.cache
