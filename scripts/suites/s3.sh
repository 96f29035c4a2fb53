# Stores that speak S3, on loopback: what every store must do, and the tests of the device on them.
# shellcheck shell=bash

# start_s3_store PROGRAM DIRECTORY: an empty store with the bucket ferry-test, on a free port. Sets
# $s3_server and exports what its users need.
start_s3_store() {
  local program=$1 directory=$2 port tries=0
  # A bucket is a directory, to both programs.
  rm -rf "$directory"
  mkdir -p "$directory/ferry-test"
  port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
  export AWS_ACCESS_KEY_ID=ferry-test AWS_SECRET_ACCESS_KEY=ferry-secret AWS_REGION=us-east-1
  export AWS_ENDPOINT_URL=http://127.0.0.1:$port
  case $program in
    versitygw)
      ROOT_ACCESS_KEY=$AWS_ACCESS_KEY_ID ROOT_SECRET_KEY=$AWS_SECRET_ACCESS_KEY \
        "$tools/bin/versitygw" --port "127.0.0.1:$port" posix "$directory" >"$directory.log" 2>&1 &
      ;;
    minio)
      MINIO_ROOT_USER=$AWS_ACCESS_KEY_ID MINIO_ROOT_PASSWORD=$AWS_SECRET_ACCESS_KEY \
        MINIO_BROWSER=off MINIO_UPDATE=off MINIO_CALLHOME_ENABLE=off \
        "$tools/bin/minio" server --quiet --address "127.0.0.1:$port" "$directory" >"$directory.log" 2>&1 &
      ;;
    *) die "no store is called $program" ;;
  esac
  s3_server=$!
  until (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do
    tries=$((tries + 1))
    if [ "$tries" = 300 ] || ! kill -0 "$s3_server" 2>/dev/null; then
      tail -n 20 "$directory.log"
      return 1
    fi
    sleep 0.1
  done
}

stop_s3_store() { kill "$s3_server"; wait "$s3_server" || true; }

# The tests that take any store, on one of these.
tests_on_s3_store() {
  local code=0
  start_s3_store "$1" "$scratch/s3-$1"
  # `--workspace` keeps cargo from building everything with another set of features.
  FERRY_TEST_STORE=s3://ferry-test cargo test --release --workspace --quiet --test store --test device || code=$?
  [ "$code" = 0 ] || tail -n 20 "$scratch/s3-$1.log"
  stop_s3_store
  return "$code"
}

suite_s3() {
  local store
  say "--- stores that speak S3"
  for store in versitygw minio; do
    # MinIO is in no registry of packages: it is tested where somebody has put it.
    if [ -x "$tools/bin/$store" ]; then
      check "$store does what a volume needs" 900 tests_on_s3_store "$store"
    else
      say "skip  $store: there is no $tools/bin/$store"
    fi
  done
}
