//! The model's own rules, where they are not plain.

use super::*;

fn path(names: &[u8]) -> Path {
    Path(names.to_vec())
}

fn with(ops: &[Op]) -> Model {
    let mut model = Model::empty();
    for (n, op) in ops.iter().enumerate() {
        assert_eq!(model.outcome(op), Outcome::Done, "{op}");
        model.apply(op, n, 10 + n as Ino);
    }
    model
}

#[test]
fn links_are_counted() {
    let model = with(&[
        Op::Mkdir(path(&[0])),
        Op::Mkdir(path(&[0, 1])),
        Op::Create(path(&[0, 2])),
        Op::Link(path(&[0, 2]), path(&[3])),
    ]);
    let nlink = |names: &[u8]| model.node(model.resolve(&path(names)).expect("there")).nlink;
    assert_eq!((nlink(&[]), nlink(&[0]), nlink(&[0, 1]), nlink(&[3])), (3, 3, 2, 2));
    assert_eq!(model.above(13 - 1), [12, 1, 10], "a file hangs from each directory that names it");
}

#[test]
fn a_directory_moves_its_link_along() {
    let model = with(&[
        Op::Mkdir(path(&[0])),
        Op::Mkdir(path(&[1])),
        Op::Rename(path(&[0]), path(&[1, 0]), Move::Replace),
    ]);
    assert_eq!((model.node(ROOT).nlink, model.node(11).nlink), (3, 3));
    let into_itself = Op::Rename(path(&[1]), path(&[1, 0, 2]), Move::Replace);
    assert_eq!(model.outcome(&into_itself), Outcome::Skip);
}

#[test]
fn an_exchange_keeps_both() {
    let model = with(&[
        Op::Mkdir(path(&[0])),
        Op::Create(path(&[1])),
        Op::Rename(path(&[0]), path(&[1]), Move::Exchange),
    ]);
    assert_eq!((model.resolve(&path(&[0])), model.resolve(&path(&[1]))), (Some(11), Some(10)));
    assert_eq!(model.node(ROOT).nlink, 3);
}

#[test]
fn a_held_file_outlives_its_name_but_not_its_handle() {
    let mut model =
        with(&[Op::Create(path(&[0])), Op::Hold(path(&[0]), 1), Op::Unlink(path(&[0]))]);
    assert_eq!(model.outcome(&Op::Write(Which::Held(1), 0, 5)), Outcome::Done);
    assert_eq!(model.outcome(&Op::LinkHeld(1, path(&[0]))), Outcome::Skip);
    assert_eq!(model.tree().len(), 1);
    model.apply(&Op::Release(1), 9, 99);
    assert!(model.nodes.len() == 1 && model.contents.is_empty());
}

#[test]
fn a_file_made_without_a_name_can_get_one() {
    let model = with(&[Op::HoldTmp(path(&[]), 0), Op::LinkHeld(0, path(&[0])), Op::Release(0)]);
    assert_eq!(model.node(10).nlink, 1);
    assert!(model.node(10).xattrs.is_empty());
}

#[test]
fn allocation_extends_or_zeroes_as_asked() {
    let cases = [
        (Alloc::Extend, 2, 9, vec![1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0]),
        (Alloc::Keep, 2, 9, vec![1; 4]),
        (Alloc::Punch, 2, 9, vec![1, 1, 0, 0]),
        (Alloc::Zero, 3, 3, vec![1, 1, 1, 0, 0, 0]),
        (Alloc::ZeroKeep, 9, 3, vec![1; 4]),
    ];
    for (how, offset, len, expected) in cases {
        let mut bytes = vec![1; 4];
        fallocate(&mut bytes, how, offset, len);
        assert_eq!(bytes, expected, "{how:?}");
    }
}

#[test]
fn patterns_hold_no_zero_and_differ() {
    let (a, b) = (pattern(1, 1000), pattern(2, 1000));
    assert!(a.iter().chain(&b).all(|byte| *byte != 0));
    assert!(a.iter().zip(&b).filter(|(a, b)| a == b).count() < 50);
    assert_eq!(pattern(1, 10), a[..10]);
}
