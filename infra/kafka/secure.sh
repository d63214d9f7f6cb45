#!/bin/sh
# One node of Apache Kafka with TLS, SCRAM logins and an authorizer; the entry point of `kafka-secure` in the compose
# file. Kafka's own image formats its data without users, so the first administrator could never log in.
#
#   SECRETS     folder for the key store, ca.pem (what clients trust) and admin.password; made at the first start
#   DATA        folder for topics
#   PORT        port for clients; CONTROLLER_PORT is for the node itself and stays on the loopback address
#   ADVERTISED  HOST:PORT that clients outside are told; INTERNAL (optional) HOST:PORT for those inside the network
#   KAFKA_BIN   folder of kafka-storage.sh and kafka-server-start.sh
set -eu
umask 077
: "${SECRETS:=/secrets}" "${DATA:=/var/lib/kafka/data}" "${PORT:=9093}" "${CONTROLLER_PORT:=9094}"
: "${ADVERTISED:=127.0.0.1:9093}" "${INTERNAL:=}" "${KAFKA_BIN:=/opt/kafka/bin}"

random() { head -c 24 /dev/urandom | base64 | tr '+/' '-_'; }
secret() { [ -s "$SECRETS/$1" ] || { random >"$SECRETS/$1.new" && mv "$SECRETS/$1.new" "$SECRETS/$1"; }; }

mkdir -p "$SECRETS" "$DATA"
secret admin.password
secret keystore.password
if [ ! -s "$SECRETS/ca.pem" ]; then
  rm -f "$SECRETS/node.p12"
  names=ip:127.0.0.1,dns:localhost${INTERNAL:+,dns:${INTERNAL%:*}}
  store="-keystore $SECRETS/node.p12 -storetype PKCS12 -storepass:file $SECRETS/keystore.password"
  # shellcheck disable=SC2086 # a list of words; no folder here has a space in its name
  keytool -genkeypair -alias node -keyalg EC -groupname secp256r1 -dname CN=headrace-node -ext "san=$names" \
    -ext bc:c -validity 3650 $store
  # shellcheck disable=SC2086
  keytool -exportcert -rfc -alias node -file "$SECRETS/ca.new" $store
  mv "$SECRETS/ca.new" "$SECRETS/ca.pem"
fi
chmod 644 "$SECRETS/ca.pem"

listeners="SASL_SSL://:$PORT${INTERNAL:+,INTERNAL://:${INTERNAL#*:}},CONTROLLER://127.0.0.1:$CONTROLLER_PORT"
advertised="SASL_SSL://$ADVERTISED${INTERNAL:+,INTERNAL://$INTERNAL}"
protocols="CONTROLLER:SSL,SASL_SSL:SASL_SSL${INTERNAL:+,INTERNAL:SASL_SSL}"
admin=$(cat "$SECRETS/admin.password")
login="org.apache.kafka.common.security.scram.ScramLoginModule required username=\"admin\" password=\"$admin\";"
cat >"$SECRETS/server.properties" <<PROPERTIES
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:$CONTROLLER_PORT
listeners=$listeners
advertised.listeners=$advertised
listener.security.protocol.map=$protocols
controller.listener.names=CONTROLLER
inter.broker.listener.name=SASL_SSL
log.dirs=$DATA
sasl.enabled.mechanisms=SCRAM-SHA-512
sasl.mechanism.inter.broker.protocol=SCRAM-SHA-512
listener.name.sasl_ssl.scram-sha-512.sasl.jaas.config=$login
listener.name.internal.scram-sha-512.sasl.jaas.config=$login
ssl.keystore.type=PKCS12
ssl.keystore.location=$SECRETS/node.p12
ssl.keystore.password=$(cat "$SECRETS/keystore.password")
ssl.truststore.type=PEM
ssl.truststore.location=$SECRETS/ca.pem
listener.name.controller.ssl.client.auth=required
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
allow.everyone.if.no.acl.found=false
super.users=User:admin;User:CN=headrace-node
auto.create.topics.enable=false
offsets.topic.replication.factor=1
offsets.retention.minutes=525600
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
group.initial.rebalance.delay.ms=0
PROPERTIES

if [ ! -s "$DATA/meta.properties" ]; then
  "$KAFKA_BIN/kafka-storage.sh" format -t "$("$KAFKA_BIN/kafka-storage.sh" random-uuid)" \
    -c "$SECRETS/server.properties" --add-scram "SCRAM-SHA-512=[name=admin,password=$admin]"
fi
exec "$KAFKA_BIN/kafka-server-start.sh" "$SECRETS/server.properties"
