import { writeFileSync } from 'node:fs'
import { join } from 'node:path'
import { packageRoot } from '../src/root.ts'
import { toBoard } from './boards/board.ts'
import { BOARDS } from './boards/boards.ts'

// Writes deploy/grafana. usage: npm run boards

for (const [name, board] of Object.entries(BOARDS)) {
  const file = join(packageRoot, 'deploy/grafana', `${name}.json`)
  writeFileSync(file, JSON.stringify(toBoard(board), null, 2) + '\n')
  console.log(file)
}
