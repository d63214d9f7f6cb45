#!/bin/sh
# Give each role of a run its login and its least rights on a secure cluster; the service `access` of the compose file.
#
#   BOOTSTRAP  HOST:PORT of the cluster        RUN      id of the run whose topics the rights are for
#   ADMIN      folder with ca.pem and admin.password
#   SECRETS    folder for ca.pem and a password file for each role; passwords that are there are kept
set -eu
umask 077
: "${BOOTSTRAP:?}" "${RUN:?}" "${ADMIN:?}" "${SECRETS:?}"

mkdir -p "$SECRETS"
cp "$ADMIN/ca.pem" "$SECRETS/ca.pem"
config=$(mktemp)
trap 'rm -f "$config"' EXIT
cat >"$config" <<TOML
[kafka]
bootstrap = "$BOOTSTRAP"
security_protocol = "SASL_SSL"
sasl_mechanism = "SCRAM-SHA-512"
sasl_username = "admin"
sasl_password_file = "$ADMIN/admin.password"
ssl_ca_location = "$ADMIN/ca.pem"
TOML
headrace kafka users --secrets "$SECRETS" --config "$config" --apply
headrace kafka acls --run "$RUN" --config "$config" --apply
