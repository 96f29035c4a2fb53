//! Any sequence of operations leaves on every device what it leaves in a plain array of bytes.

use ferry_device::{AlignedBuf, BLOCK_SIZE, BlockDevice, FileDevice, Io, MemDevice};
use ferry_env::Env;
use proptest::prelude::*;
use std::sync::{Arc, mpsc};

/// Size of the device, in blocks: a few of the chunks that the memory device takes at once.
const BLOCKS: usize = 40;

#[derive(Clone, Debug)]
enum Step {
    Write {
        first: usize,
        blocks: usize,
        byte: u8,
    },
    /// Writes that do not overlap, all in flight together.
    Submit {
        blocks: Vec<(usize, u8)>,
    },
    Discard {
        first: usize,
        blocks: usize,
    },
    Allocate {
        first: usize,
        blocks: usize,
    },
    Flush,
}

fn range() -> impl Strategy<Value = (usize, usize)> {
    (0..BLOCKS).prop_flat_map(|first| (Just(first), 1..=BLOCKS - first))
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (range(), any::<u8>()).prop_map(|((first, blocks), byte)| Step::Write { first, blocks, byte }),
        3 => prop::collection::btree_map(0..BLOCKS, any::<u8>(), 1..BLOCKS)
            .prop_map(|blocks| Step::Submit { blocks: blocks.into_iter().collect() }),
        2 => range().prop_map(|(first, blocks)| Step::Discard { first, blocks }),
        1 => range().prop_map(|(first, blocks)| Step::Allocate { first, blocks }),
        1 => Just(Step::Flush),
    ]
}

fn blocks_of(blocks: usize, byte: u8) -> AlignedBuf {
    let mut buf = AlignedBuf::zeroed(blocks * BLOCK_SIZE);
    buf.fill(byte);
    buf
}

/// Does the step on the device and in the model, where one byte stands for a block.
fn run(dev: &dyn BlockDevice, model: &mut [u8; BLOCKS], step: &Step) {
    let bytes = |blocks: usize| (blocks * BLOCK_SIZE) as u64;
    match step {
        Step::Write { first, blocks, byte } => {
            dev.write(bytes(*first), &blocks_of(*blocks, *byte)).unwrap();
            model[*first..first + blocks].fill(*byte);
        }
        Step::Submit { blocks } => {
            let (tx, rx) = mpsc::channel();
            let write = |&(block, byte): &(usize, u8)| {
                let tx = tx.clone();
                let done = Box::new(move |result| tx.send(result).unwrap());
                Io::Write { offset: bytes(block), buf: Arc::new(blocks_of(1, byte)), done }
            };
            dev.submit(blocks.iter().map(write).collect());
            blocks.iter().for_each(|&(block, byte)| model[block] = byte);
            blocks.iter().for_each(|_| rx.recv().unwrap().unwrap());
        }
        Step::Discard { first, blocks } => {
            dev.discard(bytes(*first), bytes(*blocks)).unwrap();
            model[*first..first + blocks].fill(0);
        }
        Step::Allocate { first, blocks } => dev.allocate(bytes(*first), bytes(*blocks)).unwrap(),
        Step::Flush => dev.flush().unwrap(),
    }
}

fn check(dev: &dyn BlockDevice, steps: &[Step]) {
    let mut model = [0; BLOCKS];
    for step in steps {
        run(dev, &mut model, step);
        let mut all = blocks_of(BLOCKS, 0xee);
        dev.read(0, &mut all).unwrap();
        for (block, expected) in all.chunks(BLOCK_SIZE).zip(model) {
            assert!(block.iter().all(|&b| b == expected), "after {step:?}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn a_device_behaves_as_an_array_of_bytes(steps in prop::collection::vec(step(), 1..30)) {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let size = (BLOCKS * BLOCK_SIZE) as u64;
        check(&MemDevice::new(size), &steps);
        check(&FileDevice::create(&dir.path().join("volume"), size, false, &Env::real()).unwrap(), &steps);
    }
}
