//! What every store must do, with the one that `FERRY_TEST_STORE` names.

mod common;

use common::{TestStore, open};
use ferry_env::Env;
use ferry_object::{ObjectError, ThreadExecutor, prove};
use std::process::{Command, Stdio};

#[test]
fn objects_are_read_as_they_were_written() {
    let objects = TestStore::new();
    let store = objects.store();
    let large: Vec<u8> =
        (0..16 << 20).map(|n: u32| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    store.put("s/00/1-1", &large).expect("put");
    store.put("s/00/1-1", &large).expect("put again");
    store.create("e/1", b"").expect("create");
    assert_eq!(store.create("e/1", b"x"), Err(ObjectError::Exists("e/1".into())));
    assert_eq!(store.create("s/00/1-1", &large[1..]), Err(ObjectError::Exists("s/00/1-1".into())));
    assert_eq!(store.get("e/1", None), Ok(vec![]));
    assert_eq!(store.get("e/1", Some(0..1)), Ok(vec![]));
    assert!(store.get("s/00/1-1", None).is_ok_and(|bytes| bytes == large));
    for range in [0..1_usize, 5..70_000, 0..large.len(), large.len() - 1..large.len()] {
        let asked = range.start as u64..range.end as u64;
        assert!(store.get("s/00/1-1", Some(asked)).is_ok_and(|bytes| bytes == large[range]));
    }
    let end = large.len() as u64;
    let over = store.get("s/00/1-1", Some(end - 3..end + 100)).expect("its end is there");
    assert_eq!(over, large[large.len() - 3..]);
    assert_eq!(store.get("s/00/1-1", Some(end..end + 1)), Ok(vec![]));
    assert_eq!(store.get("none", None), Err(ObjectError::NotFound("none".into())));
    store.delete("s/00/1-1").expect("delete");
    store.delete("s/00/1-1").expect("delete again");
    assert_eq!(store.get("s/00/1-1", Some(0..1)), Err(ObjectError::NotFound("s/00/1-1".into())));
    store.create("s/00/1-1", b"new").expect("a deleted name is free");
}

/// Some stores refuse before they have read the body, and then end the connection.
#[test]
fn a_name_that_exists_is_said_whatever_the_length() {
    let objects = TestStore::new();
    let store = objects.store();
    let bytes = vec![7; 16 << 20];
    store.create("w/1", b"first").expect("create");
    for length in [0, 1, 4 << 10, 64 << 10, 300 << 10, 1 << 20, 5 << 20, 16 << 20] {
        for _ in 0..3 {
            let result = store.create("w/1", &bytes[..length]);
            assert_eq!(result, Err(ObjectError::Exists("w/1".into())), "{length}");
        }
    }
}

#[test]
fn a_list_has_all_names_in_order() {
    let objects = TestStore::new();
    let store = objects.store();
    let names: Vec<_> = (0..2_200).map(|n| format!("w/{n:08x}")).collect();
    std::thread::scope(|scope| {
        for part in names.chunks(300) {
            let store = &store;
            scope.spawn(move || {
                for name in part {
                    store.create(name, b"x").expect("create");
                }
            });
        }
    });
    for other in ["v", "x/1", "ww/1"] {
        store.create(other, b"x").expect("create");
    }
    assert!(store.list("w/").is_ok_and(|listed| listed == names));
    assert_eq!(store.list("w/0000001"), Ok(names[16..32].to_vec()));
    assert_eq!(store.list("w/x"), Ok(vec![]));
}

#[test]
fn the_store_can_hold_a_volume() {
    let objects = TestStore::new();
    let threads = ThreadExecutor::new(&objects.env).expect("threads can be started");
    let warnings = prove(&*objects.store(), &threads, &objects.env).expect("it keeps the rules");
    println!("{warnings:?}");
    assert_eq!(objects.store().list(""), Ok(vec![]), "nothing is left");
}

/// Names for which two processes race.
const NAMES: usize = 100;
const RACER_STORE: &str = "FERRY_RACER_STORE";

/// One of the two: it prints the names that it got. The other test starts it.
#[test]
#[ignore = "of_two_processes_one_creates_a_name starts it"]
fn racer() {
    let store = open(&std::env::var(RACER_STORE).expect("it is started with it"), &Env::real());
    let id = std::process::id().to_string();
    // Both are ready when both have said so.
    store.create(&format!("ready/{id}"), b"").expect("create");
    while store.list("ready/").expect("list").len() < 2 {}
    for n in 0..NAMES {
        match store.create(&format!("w/{n:03}"), id.as_bytes()) {
            Ok(()) => println!("won {n} by {id}."),
            Err(ObjectError::Exists(_)) => {}
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn of_two_processes_one_creates_a_name() {
    let objects = TestStore::new();
    let program = std::env::current_exe().expect("it runs");
    let racers = [(); 2].map(|()| {
        Command::new(&program)
            .args(["--ignored", "--exact", "--nocapture", "racer"])
            .env(RACER_STORE, objects.url())
            .stdout(Stdio::piped())
            .spawn()
            .expect("it can be started")
    });
    let outputs = racers.map(|racer| racer.wait_with_output().expect("it ends"));
    let mut winners = vec![vec![]; NAMES];
    for output in &outputs {
        assert!(output.status.success(), "{output:?}");
        let text = String::from_utf8_lossy(&output.stdout);
        // The first may stand behind the words of the test runner.
        for line in text.lines().filter_map(|line| Some(line.split_once("won ")?.1)) {
            let (n, id) = line.trim_end_matches('.').split_once(" by ").expect("both");
            winners[n.parse::<usize>().expect("a number")].push(id.to_owned());
        }
    }
    let store = objects.store();
    for (n, winners) in winners.iter().enumerate() {
        let [winner] = &winners[..] else { panic!("{n} was created by {winners:?}") };
        let found = store.get(&format!("w/{n:03}"), None).expect("it is there");
        assert_eq!(String::from_utf8_lossy(&found), *winner, "{n}");
    }
    let shares =
        outputs.map(|output| String::from_utf8_lossy(&output.stdout).matches("won").count());
    println!("the processes won {shares:?}");
}
